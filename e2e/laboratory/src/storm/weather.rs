//! Random faults, which are healed after a while.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use http::StatusCode;
use prepull_e2e::api_proxy::{Fault, Requests};
use prepull_e2e::chance::Chance;
use prepull_e2e::cluster::Cluster;

use super::diary::Diary;
use super::scene::Struck;
use super::schedule::Schedule;

/// Mean time between two faults.
const STROKE_EVERY: Duration = Duration::from_secs(3);
/// Time between two looks at programs that may have ended.
const KEEP_EVERY: Duration = Duration::from_secs(2);
/// Limit for the action of a fault itself. A runtime or a cloud that starts while the API server hangs takes longer:
/// it's healed in the calm.
const STROKE_LIMIT: Duration = Duration::from_secs(45);
/// Bytes per second of a slow link: an image of some megabytes takes its time.
const SLOW: u64 = 512 << 10;
/// Size of a full disk, and its usual size.
const DISK: (u64, u64) = (24 << 20, 512 << 20);

/// Faults without a duration.
const MOMENTS: usize = 5;

/// A planned event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Planned {
    /// Restart programs that have ended by themselves, like a kubelet and systemd.
    Keep,
    Stroke,
    Heal(Trouble),
}

/// Faults with a duration. The numbers are those of clouds, nodes and registries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Trouble {
    CloudDead(usize),
    CloudFrozen(usize),
    ApiFaults,
    ApiFrozen,
    EtcdDead,
    LinkFrozen(usize),
    LinkRefused(usize),
    LinkSlow(usize),
    RegistryDown(usize),
    RegistryFrozen(usize),
    RegistrySlow(usize),
    RuntimeDead(usize),
    RuntimeFrozen(usize),
    AgentDead(usize),
    AgentFrozen(usize),
    MachineOff(usize),
    DiskFull,
    ClockOff(usize),
    /// The node runs the agent of an earlier release.
    AgentOld(usize),
}

impl Trouble {
    /// The target of the fault. A target has only one fault of a group that exclude each other.
    fn victim(self) -> (&'static str, usize) {
        match self {
            Self::CloudDead(n) | Self::CloudFrozen(n) => ("cloud", n),
            Self::ApiFaults => ("API proxy", 0),
            Self::ApiFrozen | Self::EtcdDead => ("API server", 0),
            Self::LinkFrozen(n) | Self::LinkRefused(n) | Self::LinkSlow(n) => ("link", n),
            Self::RegistryDown(n) | Self::RegistryFrozen(n) | Self::RegistrySlow(n) => ("registry", n),
            Self::RuntimeDead(n)
            | Self::RuntimeFrozen(n)
            | Self::AgentDead(n)
            | Self::AgentFrozen(n)
            | Self::MachineOff(n)
            | Self::ClockOff(n)
            | Self::AgentOld(n) => ("node", n),
            Self::DiskFull => ("disk", 0),
        }
    }

    /// Shortest and longest duration, in seconds.
    fn lasts(self) -> (u64, u64) {
        match self {
            Self::CloudDead(_) => (0, 6),
            Self::AgentDead(_) => (0, 10),
            Self::EtcdDead => (1, 8),
            Self::ApiFrozen | Self::RuntimeFrozen(_) | Self::AgentFrozen(_) => (1, 12),
            // Sometimes longer than a Lease.
            Self::CloudFrozen(_) => (1, 25),
            // After a boot the runtime comes late.
            Self::RuntimeDead(_) | Self::MachineOff(_) => (1, 15),
            Self::ApiFaults | Self::RegistryDown(_) | Self::RegistryFrozen(_) => (3, 20),
            Self::LinkFrozen(_) | Self::LinkRefused(_) | Self::LinkSlow(_) | Self::DiskFull => (3, 30),
            Self::RegistrySlow(_) => (10, 40),
            Self::ClockOff(_) | Self::AgentOld(_) => (10, 60),
        }
    }
}

/// The weather of one storm.
pub(super) struct Weather {
    chance: Chance,
    schedule: Schedule<Planned>,
    /// Current faults.
    struck: BTreeSet<(&'static str, usize)>,
    strokes: usize,
}

impl Weather {
    pub(super) fn new(seed: u64, duration: Duration) -> Self {
        Self {
            chance: Chance::new(seed, 0),
            schedule: Schedule::new(duration),
            struck: BTreeSet::new(),
            strokes: 0,
        }
    }

    /// Number of faults so far.
    pub(super) fn strokes(&self) -> usize {
        self.strokes
    }

    /// Causes and heals faults until the storm is over, and heals the rest.
    pub(super) async fn blow(&mut self, parts: &mut Struck, cluster: &Cluster, diary: &Diary) {
        self.schedule.begin();
        self.schedule.plan(STROKE_EVERY, Planned::Stroke);
        self.schedule.plan(KEEP_EVERY, Planned::Keep);
        while let Some(planned) = self.schedule.next().await {
            match planned {
                Planned::Keep => {
                    self.schedule.plan(KEEP_EVERY, Planned::Keep);
                    keep(parts, diary).await;
                }
                Planned::Stroke => {
                    let wait = self.chance.wait(STROKE_EVERY);
                    self.schedule.plan(wait, Planned::Stroke);
                    self.strike(parts, cluster, diary).await;
                }
                Planned::Heal(trouble) => {
                    self.struck.remove(&trouble.victim());
                    act(&format!("healed: {trouble:?}"), diary, heal(trouble, parts, cluster)).await;
                }
            }
        }
        let rest = self.schedule.take_rest().into_iter();
        let mut rest: Vec<_> = rest
            .filter_map(|planned| match planned {
                Planned::Heal(trouble) => Some(trouble),
                Planned::Keep | Planned::Stroke => None,
            })
            .collect();
        // The API server first: the others need it to start.
        rest.sort_by_key(|trouble| trouble.victim().0 != "API server");
        for trouble in rest {
            act(&format!("healed at the end: {trouble:?}"), diary, heal(trouble, parts, cluster)).await;
        }
        keep(parts, diary).await;
    }

    async fn strike(&mut self, parts: &mut Struck, cluster: &Cluster, diary: &Diary) {
        self.strokes += 1;
        let (cloud, node, registry) = (
            self.chance.below(parts.clouds.len()),
            self.chance.below(parts.nodes.len()),
            self.chance.below(parts.registries.len()),
        );
        let lasting = [
            Trouble::CloudDead(cloud),
            Trouble::CloudFrozen(cloud),
            Trouble::ApiFaults,
            Trouble::ApiFaults,
            Trouble::ApiFrozen,
            Trouble::EtcdDead,
            Trouble::LinkFrozen(node),
            Trouble::LinkRefused(node),
            Trouble::LinkSlow(node),
            Trouble::RegistryDown(registry),
            Trouble::RegistryFrozen(registry),
            Trouble::RegistrySlow(registry),
            Trouble::RuntimeDead(node),
            Trouble::RuntimeFrozen(node),
            Trouble::AgentDead(node),
            Trouble::AgentFrozen(node),
            Trouble::MachineOff(node),
            Trouble::DiskFull,
            Trouble::ClockOff(node),
            Trouble::AgentOld(node),
        ];
        // The faults without a duration, after those with one.
        match self.chance.below(lasting.len() + MOMENTS) {
            number if number < lasting.len() => {
                let trouble = lasting[number];
                let (least, most) = trouble.lasts();
                let lasts = self.chance.between(Duration::from_secs(least), Duration::from_secs(most));
                // Drawn before looking at the current faults, so that the draws don't depend on them.
                let draws = [self.chance.part(), self.chance.part()];
                let is_possible = parts.before.is_some() || !matches!(trouble, Trouble::AgentOld(_));
                if !is_possible || !self.struck.insert(trouble.victim()) {
                    return;
                }
                self.schedule.plan(lasts, Planned::Heal(trouble));
                let what = format!("struck for {:.1} s: {trouble:?}", lasts.as_secs_f64());
                act(&what, diary, begin(trouble, parts, cluster, draws)).await;
            }
            number => {
                let (what, done) = moment(number - lasting.len(), node, registry, parts);
                diary.note(&format!("struck: {what}"));
                if let Err(error) = done {
                    diary.note(&format!("  which failed: {error:#}"));
                }
            }
        }
    }
}

/// Carries out an action that may hang or fail, and records it.
async fn act(what: &str, diary: &Diary, work: impl Future<Output = Result<()>>) {
    diary.note(what);
    match tokio::time::timeout(STROKE_LIMIT, work).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => diary.note(&format!("  which failed: {error:#}")),
        Err(_) => diary.note("  which was given up"),
    }
}

/// Restarts ended programs, in an endless loop.
pub(super) async fn keep_running(parts: &mut Struck, diary: &Diary) {
    loop {
        revive(parts, diary).await;
        tokio::time::sleep(KEEP_EVERY).await;
    }
}

/// Starts programs that aren't running, unless a fault stopped them.
pub(super) async fn revive(parts: &mut Struck, diary: &Diary) {
    for (number, cloud) in parts.clouds.iter_mut().enumerate() {
        if cloud.process().is_err() {
            act(&format!("cloud {number} is started"), diary, cloud.restart()).await;
        }
    }
    keep(parts, diary).await;
}

/// Restarts programs that have ended by themselves.
async fn keep(parts: &mut Struck, diary: &Diary) {
    for (number, cloud) in parts.clouds.iter_mut().enumerate() {
        if cloud.has_ended() {
            act(&format!("cloud {number} had ended by itself, and is started"), diary, cloud.restart()).await;
        }
    }
    for node in &mut parts.nodes {
        if node.has_agent_ended() {
            let what = format!("the agent of {} had ended by itself, and is started", node.name());
            act(&what, diary, async { node.restart_agent() }).await;
        }
    }
}

fn moment(number: usize, node: usize, registry: usize, parts: &Struck) -> (String, Result<()>) {
    match number {
        0 => {
            parts.links[node].cut();
            (format!("the link of node {node} is cut"), Ok(()))
        }
        1 => {
            parts.api.expire_watches();
            ("all watches expire".to_owned(), Ok(()))
        }
        2 => {
            parts.ways[registry].fail_next(3, 503);
            (format!("registry {registry} answers 503 three times"), Ok(()))
        }
        3 => {
            parts.api.silence_connections();
            ("the connections to the API server go silent".to_owned(), Ok(()))
        }
        _ => {
            parts.ways[registry].cut();
            (format!("the connections of registry {registry} are cut"), Ok(()))
        }
    }
}

async fn begin(trouble: Trouble, parts: &mut Struck, cluster: &Cluster, draws: [f64; 2]) -> Result<()> {
    match trouble {
        // Every second one gets SIGTERM, as in a rollout.
        Trouble::CloudDead(n) if draws[0] < 0.5 => parts.clouds[n].terminate().await,
        Trouble::CloudDead(n) => parts.clouds[n].kill9(),
        Trouble::CloudFrozen(n) => parts.clouds[n].pause(),
        Trouble::ApiFaults => {
            let fault = match draws[0] {
                draw if draw < 0.2 => Fault::Status(StatusCode::CONFLICT.as_u16()),
                draw if draw < 0.35 => Fault::Status(StatusCode::TOO_MANY_REQUESTS.as_u16()),
                draw if draw < 0.55 => Fault::Status(StatusCode::INTERNAL_SERVER_ERROR.as_u16()),
                draw if draw < 0.7 => Fault::Late(Duration::from_millis(200), Duration::from_secs(3)),
                draw if draw < 0.85 => Fault::LostAnswer,
                _ => Fault::Cut,
            };
            // A conflict is no answer to a read.
            let conflict = fault == Fault::Status(StatusCode::CONFLICT.as_u16());
            let requests = if conflict || draws[1] < 0.6 { Requests::WRITES } else { Requests::ALL };
            parts.api.inject(requests, 0.1 + 0.4 * draws[1], fault);
            Ok(())
        }
        Trouble::ApiFrozen => cluster.pause_api(),
        Trouble::EtcdDead => cluster.stop_etcd(),
        Trouble::LinkFrozen(n) => {
            parts.links[n].freeze();
            Ok(())
        }
        Trouble::LinkRefused(n) => {
            parts.links[n].refuse();
            Ok(())
        }
        Trouble::LinkSlow(n) => {
            parts.links[n].delay(Duration::from_millis(300));
            Ok(())
        }
        Trouble::RegistryDown(n) => {
            parts.ways[n].refuse();
            Ok(())
        }
        Trouble::RegistryFrozen(n) => {
            parts.ways[n].freeze();
            Ok(())
        }
        Trouble::RegistrySlow(n) => {
            parts.ways[n].throttle(Some(SLOW));
            Ok(())
        }
        Trouble::RuntimeDead(n) => parts.nodes[n].containerd_mut().kill9(),
        Trouble::RuntimeFrozen(n) => parts.nodes[n].containerd().pause(),
        Trouble::AgentDead(n) => parts.nodes[n].kill9_agent(),
        Trouble::AgentFrozen(n) => parts.nodes[n].stop_agent(),
        Trouble::MachineOff(n) => {
            parts.nodes[n].kill9_agent()?;
            parts.nodes[n].containerd_mut().kill9()
        }
        // The last node has the small disk.
        Trouble::DiskFull => parts.nodes[parts.nodes.len() - 1].containerd().resize_disk(DISK.0).await,
        Trouble::ClockOff(n) => {
            // Behind by less than the backdating of certificates, or ahead by hours.
            #[allow(clippy::cast_possible_truncation)]
            let seconds =
                if draws[0] < 0.5 { -(draws[1] * 200.0) as i64 } else { (draws[1] * 10_000.0) as i64 };
            parts.nodes[n].set_clock_off_by(seconds)?;
            parts.nodes[n].restart_agent()
        }
        Trouble::AgentOld(n) => {
            let before = parts.before.clone();
            parts.nodes[n].replace_agent(before.as_deref())
        }
    }
}

async fn heal(trouble: Trouble, parts: &mut Struck, cluster: &Cluster) -> Result<()> {
    match trouble {
        Trouble::CloudDead(n) => parts.clouds[n].restart().await,
        Trouble::CloudFrozen(n) => match parts.clouds[n].resume() {
            Ok(()) => Ok(()),
            // A leader that has lost its Lease ends.
            Err(_) => parts.clouds[n].restart().await,
        },
        Trouble::ApiFaults => {
            parts.api.heal();
            Ok(())
        }
        Trouble::ApiFrozen => cluster.resume_api(),
        Trouble::EtcdDead => cluster.start_etcd().await,
        Trouble::LinkFrozen(n) => {
            parts.links[n].thaw();
            Ok(())
        }
        Trouble::LinkRefused(n) => parts.links[n].accept(),
        Trouble::LinkSlow(n) => {
            parts.links[n].delay(Duration::ZERO);
            Ok(())
        }
        Trouble::RegistryDown(n) => parts.ways[n].accept(),
        Trouble::RegistryFrozen(n) => {
            parts.ways[n].thaw();
            Ok(())
        }
        Trouble::RegistrySlow(n) => {
            parts.ways[n].throttle(None);
            Ok(())
        }
        Trouble::RuntimeDead(n) => parts.nodes[n].restart_containerd().await,
        Trouble::RuntimeFrozen(n) => parts.nodes[n].containerd().resume(),
        Trouble::AgentDead(n) => parts.nodes[n].restart_agent(),
        Trouble::AgentFrozen(n) => parts.nodes[n].cont_agent(),
        Trouble::MachineOff(n) => {
            // The agent first, as at a boot with a slow runtime.
            parts.nodes[n].restart_agent()?;
            parts.nodes[n].restart_containerd().await
        }
        Trouble::DiskFull => parts.nodes[parts.nodes.len() - 1].containerd().resize_disk(DISK.1).await,
        Trouble::ClockOff(n) => {
            parts.nodes[n].set_clock_off_by(0)?;
            parts.nodes[n].restart_agent()
        }
        Trouble::AgentOld(n) => parts.nodes[n].replace_agent(None),
    }
}
