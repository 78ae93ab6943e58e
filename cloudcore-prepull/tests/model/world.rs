//! The world: an API server, one cloudcore at a time, edges, and the messages between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use edgecore_prepull::tasks::agent::AgentEvent;
use jiff::Timestamp;
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::task::{JobUid, NodeName};

use crate::api::Api;
use crate::check::Check;
use crate::cloud::{Cloud, Write};
use crate::conn::Conn;
use crate::edge::Edge;
use crate::rng::Rng;

pub(crate) struct World {
    pub(crate) rng: Rng,
    /// Milliseconds since the beginning.
    pub(crate) now: u64,
    pub(crate) base: Instant,
    pub(crate) api: Api,
    pub(crate) cloud: Cloud,
    /// The most nodes in a report; `None` for the usual number.
    pub(crate) report: Option<usize>,
    /// Writes of killed cloudcores that may still reach the API server.
    pub(crate) ghosts: Vec<Write>,
    pub(crate) edges: Vec<Edge>,
    pub(crate) conns: BTreeMap<u64, Conn>,
    pub(crate) next_conn: u64,
    pub(crate) check: Check,
    /// Messages may arrive twice.
    pub(crate) duplicates: bool,
    pub(crate) calm: bool,
    trace: Option<VecDeque<String>>,
    pub(crate) names: usize,
    /// Whether some jobs remove images, and some agents are too old for that.
    pub(crate) removes: bool,
    /// Nodes that were deleted at some time.
    pub(crate) deleted: BTreeSet<NodeName>,
    /// The last valid spec of each job.
    pub(crate) good_specs: BTreeMap<JobUid, ImagePrePullJobSpec>,
    /// Until then the API server refuses every report.
    pub(crate) reports_refused_until: u64,
    /// Until then the secrets of these jobs cannot be read.
    pub(crate) secrets_hang_until: BTreeMap<JobUid, u64>,
}

const TRACE: usize = 200;

impl World {
    pub(crate) fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::new(seed);
        let edges = 1 + rng.below(6);
        let names = 1 + rng.below(3);
        let duplicates = rng.chance(30);
        let report = rng.pick(&[None, Some(1), Some(2), Some(3)]);
        let mut world = Self {
            now: 0,
            base: Instant::now(),
            api: Api::default(),
            cloud: Cloud::new(report),
            report,
            ghosts: Vec::new(),
            edges: Vec::new(),
            conns: BTreeMap::new(),
            next_conn: 0,
            check: Check::new(duplicates),
            duplicates,
            calm: false,
            trace: trace.then(VecDeque::new),
            names,
            // Not in the runs that found something before, so that they still mean what they did.
            removes: (2..5).contains(&(seed % 8)),
            deleted: BTreeSet::new(),
            good_specs: BTreeMap::new(),
            reports_refused_until: 0,
            secrets_hang_until: BTreeMap::new(),
            rng,
        };
        for n in 0..edges {
            let (max_tasks, skew) = (world.rng.pick(&[1, 1, 2]), world.rng.pick(&[0, 0, 300_000]));
            world.edges.push(Edge::new(NodeName(format!("n{n}")), max_tasks, skew));
            if world.removes {
                world.edges[n].removes = world.rng.chance(70);
                let images = (0..3).map(|image| format!("r.example/app{image}:v1"));
                let images: Vec<_> = images.filter(|_| world.rng.chance(50)).collect();
                world.edges[n].images.extend(images);
            }
            world.put_node(n, true, true, false);
            world.on_edge(n, AgentEvent::Loaded(Vec::new()));
        }
        world
    }

    pub(crate) fn log(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE {
                trace.pop_front();
            }
            trace.push_back(format!("{:>5}.{:03}s {}", now / 1000, now % 1000, line()));
        }
    }

    pub(crate) fn traced(&self) -> impl Iterator<Item = &String> {
        self.trace.iter().flatten()
    }

    pub(crate) fn time(&self) -> Timestamp {
        at(self.now)
    }
}

/// When runs begin, in milliseconds since 1970.
pub(crate) const BASE: u64 = 1_000_000_000_000;

pub(crate) fn at(millis: u64) -> Timestamp {
    Timestamp::from_millisecond(i64::try_from(BASE + millis).unwrap()).unwrap()
}

pub(crate) fn millis(time: Timestamp) -> u64 {
    u64::try_from(time.as_millisecond()).unwrap() - BASE
}
