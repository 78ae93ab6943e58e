//! Random faults, which are healed after a while.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use http::StatusCode;
use prepull_e2e::api_proxy::{Fault, Requests};
use prepull_e2e::chance::Chance;
use prepull_e2e::cluster::Cluster;

use super::diary::Diary;
use super::scene::StormParts;
use super::schedule::StormSchedule;

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
enum WeatherEvent {
    /// Restart programs that have ended by themselves, like a kubelet and systemd.
    Keep,
    Stroke,
    Heal(LastingFault),
}

/// Faults with a duration. The numbers are those of clouds, nodes and registries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LastingFault {
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

impl LastingFault {
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
    schedule: StormSchedule<WeatherEvent>,
    /// Current faults.
    struck: BTreeSet<(&'static str, usize)>,
    strokes: usize,
}

impl Weather {
    pub(super) fn new(seed: u64, duration: Duration) -> Self {
        Self {
            chance: Chance::new(seed, 0),
            schedule: StormSchedule::new(duration),
            struck: BTreeSet::new(),
            strokes: 0,
        }
    }

    /// Number of faults so far.
    pub(super) fn strokes(&self) -> usize {
        self.strokes
    }

    /// Causes and heals faults until the storm is over, and heals the rest.
    pub(super) async fn cause_faults(&mut self, parts: &mut StormParts, cluster: &Cluster, diary: &Diary) {
        self.schedule.begin();
        self.schedule.plan(STROKE_EVERY, WeatherEvent::Stroke);
        self.schedule.plan(KEEP_EVERY, WeatherEvent::Keep);
        while let Some(planned) = self.schedule.next().await {
            match planned {
                WeatherEvent::Keep => {
                    self.schedule.plan(KEEP_EVERY, WeatherEvent::Keep);
                    restart_ended(parts, diary).await;
                }
                WeatherEvent::Stroke => {
                    let wait = self.chance.wait(STROKE_EVERY);
                    self.schedule.plan(wait, WeatherEvent::Stroke);
                    self.strike_randomly(parts, cluster, diary).await;
                }
                WeatherEvent::Heal(trouble) => {
                    self.struck.remove(&trouble.victim());
                    carry_out(&format!("healed: {trouble:?}"), diary, heal(trouble, parts, cluster)).await;
                }
            }
        }
        let rest = self.schedule.take_rest().into_iter();
        let mut rest: Vec<_> = rest
            .filter_map(|planned| match planned {
                WeatherEvent::Heal(trouble) => Some(trouble),
                WeatherEvent::Keep | WeatherEvent::Stroke => None,
            })
            .collect();
        // The API server first: the others need it to start.
        rest.sort_by_key(|trouble| trouble.victim().0 != "API server");
        for trouble in rest {
            carry_out(&format!("healed at the end: {trouble:?}"), diary, heal(trouble, parts, cluster)).await;
        }
        restart_ended(parts, diary).await;
    }

    async fn strike_randomly(&mut self, parts: &mut StormParts, cluster: &Cluster, diary: &Diary) {
        self.strokes += 1;
        let (cloud, node, registry) = (
            self.chance.below(parts.clouds.len()),
            self.chance.below(parts.nodes.len()),
            self.chance.below(parts.registries.len()),
        );
        let lasting = [
            LastingFault::CloudDead(cloud),
            LastingFault::CloudFrozen(cloud),
            LastingFault::ApiFaults,
            LastingFault::ApiFaults,
            LastingFault::ApiFrozen,
            LastingFault::EtcdDead,
            LastingFault::LinkFrozen(node),
            LastingFault::LinkRefused(node),
            LastingFault::LinkSlow(node),
            LastingFault::RegistryDown(registry),
            LastingFault::RegistryFrozen(registry),
            LastingFault::RegistrySlow(registry),
            LastingFault::RuntimeDead(node),
            LastingFault::RuntimeFrozen(node),
            LastingFault::AgentDead(node),
            LastingFault::AgentFrozen(node),
            LastingFault::MachineOff(node),
            LastingFault::DiskFull,
            LastingFault::ClockOff(node),
            LastingFault::AgentOld(node),
        ];
        // The faults without a duration, after those with one.
        match self.chance.below(lasting.len() + MOMENTS) {
            number if number < lasting.len() => {
                let trouble = lasting[number];
                let (least, most) = trouble.lasts();
                let lasts = self.chance.between(Duration::from_secs(least), Duration::from_secs(most));
                // Drawn before looking at the current faults, so that the draws don't depend on them.
                let draws = [self.chance.part(), self.chance.part()];
                let is_possible = parts.before.is_some() || !matches!(trouble, LastingFault::AgentOld(_));
                if !is_possible || !self.struck.insert(trouble.victim()) {
                    return;
                }
                self.schedule.plan(lasts, WeatherEvent::Heal(trouble));
                let what = format!("struck for {:.1} s: {trouble:?}", lasts.as_secs_f64());
                carry_out(&what, diary, begin_fault(trouble, parts, cluster, draws)).await;
            }
            number => {
                let (what, done) = momentary_fault(number - lasting.len(), node, registry, parts);
                diary.note_event(&format!("struck: {what}"));
                if let Err(error) = done {
                    diary.note_event(&format!("  which failed: {error:#}"));
                }
            }
        }
    }
}

/// Carries out an action that may hang or fail, and records it.
async fn carry_out(what: &str, diary: &Diary, work: impl Future<Output = Result<()>>) {
    diary.note_event(what);
    match tokio::time::timeout(STROKE_LIMIT, work).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => diary.note_event(&format!("  which failed: {error:#}")),
        Err(_) => diary.note_event("  which was given up"),
    }
}

/// Restarts ended programs, in an endless loop.
pub(super) async fn keep_running(parts: &mut StormParts, diary: &Diary) {
    loop {
        start_stopped(parts, diary).await;
        tokio::time::sleep(KEEP_EVERY).await;
    }
}

/// Starts programs that aren't running, unless a fault stopped them.
pub(super) async fn start_stopped(parts: &mut StormParts, diary: &Diary) {
    for (number, cloud) in parts.clouds.iter_mut().enumerate() {
        if cloud.process().is_err() {
            carry_out(&format!("cloud {number} is started"), diary, cloud.restart()).await;
        }
    }
    restart_ended(parts, diary).await;
}

/// Restarts programs that have ended by themselves.
async fn restart_ended(parts: &mut StormParts, diary: &Diary) {
    for (number, cloud) in parts.clouds.iter_mut().enumerate() {
        if cloud.has_ended() {
            carry_out(&format!("cloud {number} had ended by itself, and is started"), diary, cloud.restart())
                .await;
        }
    }
    for node in &mut parts.nodes {
        if node.has_agent_ended() {
            let what = format!("the agent of {} had ended by itself, and is started", node.name());
            carry_out(&what, diary, async { node.restart_agent() }).await;
        }
    }
}

fn momentary_fault(number: usize, node: usize, registry: usize, parts: &StormParts) -> (String, Result<()>) {
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

async fn begin_fault(
    trouble: LastingFault,
    parts: &mut StormParts,
    cluster: &Cluster,
    draws: [f64; 2],
) -> Result<()> {
    match trouble {
        // Every second one gets SIGTERM, as in a rollout.
        LastingFault::CloudDead(n) if draws[0] < 0.5 => parts.clouds[n].terminate().await,
        LastingFault::CloudDead(n) => parts.clouds[n].kill9(),
        LastingFault::CloudFrozen(n) => parts.clouds[n].pause(),
        LastingFault::ApiFaults => {
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
        LastingFault::ApiFrozen => cluster.pause_api(),
        LastingFault::EtcdDead => cluster.stop_etcd(),
        LastingFault::LinkFrozen(n) => {
            parts.links[n].freeze();
            Ok(())
        }
        LastingFault::LinkRefused(n) => {
            parts.links[n].refuse();
            Ok(())
        }
        LastingFault::LinkSlow(n) => {
            parts.links[n].delay(Duration::from_millis(300));
            Ok(())
        }
        LastingFault::RegistryDown(n) => {
            parts.ways[n].refuse();
            Ok(())
        }
        LastingFault::RegistryFrozen(n) => {
            parts.ways[n].freeze();
            Ok(())
        }
        LastingFault::RegistrySlow(n) => {
            parts.ways[n].throttle(Some(SLOW));
            Ok(())
        }
        LastingFault::RuntimeDead(n) => parts.nodes[n].containerd_mut().kill9(),
        LastingFault::RuntimeFrozen(n) => parts.nodes[n].containerd().pause(),
        LastingFault::AgentDead(n) => parts.nodes[n].kill9_agent(),
        LastingFault::AgentFrozen(n) => parts.nodes[n].stop_agent(),
        LastingFault::MachineOff(n) => {
            parts.nodes[n].kill9_agent()?;
            parts.nodes[n].containerd_mut().kill9()
        }
        // The last node has the small disk.
        LastingFault::DiskFull => parts.nodes[parts.nodes.len() - 1].containerd().resize_disk(DISK.0).await,
        LastingFault::ClockOff(n) => {
            // Behind by less than the backdating of certificates, or ahead by hours.
            #[allow(clippy::cast_possible_truncation)]
            let seconds =
                if draws[0] < 0.5 { -(draws[1] * 200.0) as i64 } else { (draws[1] * 10_000.0) as i64 };
            parts.nodes[n].set_clock_off_by(seconds)?;
            parts.nodes[n].restart_agent()
        }
        LastingFault::AgentOld(n) => {
            let before = parts.before.clone();
            parts.nodes[n].replace_agent(before.as_deref())
        }
    }
}

async fn heal(trouble: LastingFault, parts: &mut StormParts, cluster: &Cluster) -> Result<()> {
    match trouble {
        LastingFault::CloudDead(n) => parts.clouds[n].restart().await,
        LastingFault::CloudFrozen(n) => match parts.clouds[n].resume() {
            Ok(()) => Ok(()),
            // A leader that has lost its Lease ends.
            Err(_) => parts.clouds[n].restart().await,
        },
        LastingFault::ApiFaults => {
            parts.api.heal();
            Ok(())
        }
        LastingFault::ApiFrozen => cluster.resume_api(),
        LastingFault::EtcdDead => cluster.start_etcd().await,
        LastingFault::LinkFrozen(n) => {
            parts.links[n].thaw();
            Ok(())
        }
        LastingFault::LinkRefused(n) => parts.links[n].accept_again(),
        LastingFault::LinkSlow(n) => {
            parts.links[n].delay(Duration::ZERO);
            Ok(())
        }
        LastingFault::RegistryDown(n) => parts.ways[n].accept_again(),
        LastingFault::RegistryFrozen(n) => {
            parts.ways[n].thaw();
            Ok(())
        }
        LastingFault::RegistrySlow(n) => {
            parts.ways[n].throttle(None);
            Ok(())
        }
        LastingFault::RuntimeDead(n) => parts.nodes[n].restart_containerd().await,
        LastingFault::RuntimeFrozen(n) => parts.nodes[n].containerd().resume(),
        LastingFault::AgentDead(n) => parts.nodes[n].restart_agent(),
        LastingFault::AgentFrozen(n) => parts.nodes[n].cont_agent(),
        LastingFault::MachineOff(n) => {
            // The agent first, as at a boot with a slow runtime.
            parts.nodes[n].restart_agent()?;
            parts.nodes[n].restart_containerd().await
        }
        LastingFault::DiskFull => parts.nodes[parts.nodes.len() - 1].containerd().resize_disk(DISK.1).await,
        LastingFault::ClockOff(n) => {
            parts.nodes[n].set_clock_off_by(0)?;
            parts.nodes[n].restart_agent()
        }
        LastingFault::AgentOld(n) => parts.nodes[n].replace_agent(None),
    }
}
