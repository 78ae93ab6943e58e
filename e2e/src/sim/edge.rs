//! One simulated edge: it carries out the real agent's decisions, without a disk and without a runtime.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use edgecore_prepull::cloud::identity::Identity;
use edgecore_prepull::cloud::tunnel::dial::{self, Dial};
use edgecore_prepull::cloud::tunnel::{TunnelEvent, TunnelSender};
use edgecore_prepull::tasks::agent::{AgentEffect, AgentEvent, Now, TaskAgent, TaskRecord};
use prepull_api::task::TaskId;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::behaviour::Behaviour;
use super::counts::FleetCounters;
use super::machine::SimulatedMachine;
use crate::chance::Chance;

/// Capacity of the queue of events from the tunnel, more than an edge has tasks in these tests.
const QUEUE: usize = 16;
/// Longest time until an edge dials again after a cut or a restart.
const LONGEST_OUTAGE: Duration = Duration::from_secs(2);

/// The state that all edges of a fleet share.
pub(super) struct FleetContext {
    pub(super) url: String,
    pub(super) behaviour: Arc<Behaviour>,
    pub(super) counts: Arc<FleetCounters>,
    pub(super) shutdown: CancellationToken,
    pub(super) tasks: TaskTracker,
}

pub(super) struct SimulatedEdge {
    shared: Arc<FleetContext>,
    identity: Identity,
    /// Random numbers for faults; those for pulls are another stream.
    chance: Chance,
    agent: TaskAgent,
    machine: SimulatedMachine,
    /// The ledger, which a real edge has on disk.
    ledger: BTreeMap<TaskId, TaskRecord>,
    tunnel: Option<TunnelTask>,
    faults: Faults,
    connected: bool,
    /// Number of the last roll call that counted this edge.
    called: u64,
    tasks: usize,
}

/// The task that keeps the session up, with its queues.
struct TunnelTask {
    link: TunnelSender,
    events: mpsc::Receiver<TunnelEvent>,
    task: JoinHandle<()>,
}

/// Times of the next faults.
#[derive(Default)]
struct Faults {
    /// Losses and restarts so far.
    count: u32,
    disconnect: Option<Instant>,
    restart: Option<Instant>,
    /// Time to dial again after a cut or a restart.
    redial: Option<Instant>,
}

/// A reason for the edge to wake up.
enum Woken {
    Shutdown,
    Tunnel(Box<TunnelEvent>),
    Time,
}

impl SimulatedEdge {
    pub(super) fn new(shared: Arc<FleetContext>, identity: Identity, number: u64, fails: bool) -> Self {
        let FleetContext { behaviour, counts, .. } = &*shared;
        let (chance, pulls) =
            (Chance::new(behaviour.seed, 2 * number), Chance::new(behaviour.seed, 2 * number + 1));
        let machine = SimulatedMachine::new(Arc::clone(behaviour), pulls, fails, Arc::clone(counts));
        Self {
            identity,
            chance,
            agent: TaskAgent::new(NonZeroU32::MIN),
            machine,
            ledger: BTreeMap::new(),
            tunnel: None,
            faults: Faults::default(),
            connected: false,
            called: 0,
            tasks: 0,
            shared,
        }
    }

    /// Runs until the fleet is stopped.
    pub(super) async fn run(mut self) {
        self.dial();
        loop {
            let mut events = VecDeque::new();
            match self.wait_for_wake().await {
                Woken::Shutdown => break,
                Woken::Tunnel(event) => events.extend(self.translate_event(*event)),
                Woken::Time => self.handle_time(Instant::now(), &mut events),
            }
            self.handle_events(events).await;
            if self.machine.take_restart() {
                self.faults.restart = Some(Instant::now());
            }
        }
        self.set_connected(false);
    }

    async fn wait_for_wake(&mut self) -> Woken {
        let Faults { disconnect, restart, redial, .. } = self.faults;
        let due = [self.agent.next_tick(), self.machine.next_due(), disconnect, restart, redial];
        let due = due.into_iter().flatten().min();
        let tunnel = async {
            match &mut self.tunnel {
                Some(tunnel) => tunnel.events.recv().await,
                None => None,
            }
        };
        tokio::select! {
            () = self.shared.shutdown.cancelled() => Woken::Shutdown,
            Some(event) = tunnel => Woken::Tunnel(Box::new(event)),
            () = sleep_until(due) => Woken::Time,
        }
    }

    /// Handles everything that's due at this time.
    fn handle_time(&mut self, now: Instant, events: &mut VecDeque<AgentEvent>) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.faults.restart) {
            self.shared.counts.restarts.fetch_add(1, Ordering::SeqCst);
            self.faults.count += 1;
            self.cut(now, &mut VecDeque::new());
            self.machine.restart();
            self.agent = TaskAgent::new(self.agent.max_tasks());
            events.push_back(AgentEvent::Loaded(self.ledger.values().cloned().collect()));
            self.faults.restart = None;
        } else if is_due(self.faults.disconnect) {
            self.shared.counts.cuts.fetch_add(1, Ordering::SeqCst);
            self.faults.count += 1;
            self.cut(now, events);
        }
        if is_due(self.faults.redial) {
            self.faults.redial = None;
            self.dial();
        }
        if is_due(self.agent.next_tick()) {
            events.push_back(AgentEvent::Tick);
        }
        self.machine.advance(now, events);
    }

    /// Plans the next faults of an edge that has just connected. If we counted from another time, such as the last
    /// fault, they would come faster than a slow machine connects edges, and nothing would ever get through.
    fn plan_faults(&mut self, now: Instant) {
        let Behaviour { disconnect_every, restart_every, most_faults, .. } = *self.shared.behaviour;
        if most_faults.is_some_and(|most| self.faults.count >= most) {
            return;
        }
        self.faults.disconnect = disconnect_every.map(|mean| now + self.chance.wait(mean));
        if self.faults.restart.is_none() {
            self.faults.restart = restart_every.map(|mean| now + self.chance.wait(mean));
        }
    }

    fn dial(&mut self) {
        let FleetContext { url, behaviour, shutdown, tasks, .. } = &*self.shared;
        let mut settings = dial::TunnelSettings::default();
        if let Some(longest) = behaviour.redial_within {
            settings.last_backoff = longest;
        }
        let (link, outgoing) = TunnelSender::new(QUEUE);
        let (events, tunnel) = mpsc::channel(QUEUE);
        let (identity, url) = (self.identity.clone(), url.clone());
        let dial = Dial::new(settings, identity, events, shutdown.clone());
        let run = dial.keep_session(url, outgoing);
        let task = tasks.spawn(async move {
            let _ = run.await; // it fails for a wrong URL alone, and ours has the form of one
        });
        self.tunnel = Some(TunnelTask { link, events: tunnel, task });
    }

    /// Cuts without a message to either side: drops the session's task and its socket. Messages in transit are lost.
    fn cut(&mut self, now: Instant, events: &mut VecDeque<AgentEvent>) {
        if let Some(tunnel) = self.tunnel.take() {
            tunnel.task.abort();
        }
        if self.connected {
            self.set_connected(false);
            events.push_back(AgentEvent::Disconnected);
        }
        self.faults.redial = Some(now + self.chance.between(Duration::ZERO, LONGEST_OUTAGE));
    }

    /// Translates an event of the tunnel into one for the agent.
    fn translate_event(&mut self, event: TunnelEvent) -> Option<AgentEvent> {
        let message = match event {
            TunnelEvent::Connecting(answer) => {
                let hello = Hello {
                    upgrades: true,
                    removes: true,
                    version: self.machine.version().to_owned(),
                    os: "linux".to_owned(),
                    arch: "amd64".to_owned(),
                    runtime: Some("simulated 1".to_owned()),
                    image_filesystem: None,
                    max_tasks: Some(self.agent.max_tasks().get()),
                    open: self.agent.open_tasks(),
                    trusts: None, // the tunnel knows
                    time_zone: None,
                    windows: Vec::new(),
                    pins: None,
                    peer: None,
                    settings: None,
                };
                let _ = answer.send(hello); // fails if the attempt to connect is over
                return None;
            }
            TunnelEvent::Connected(_) => {
                self.set_connected(true);
                return Some(AgentEvent::Connected);
            }
            TunnelEvent::Disconnected => {
                self.set_connected(false);
                return Some(AgentEvent::Disconnected);
            }
            TunnelEvent::Message(message) => message,
        };
        self.shared.counts.received_messages.fetch_add(1, Ordering::Relaxed);
        match message {
            CloudMessage::Assign(assign) => {
                if !self.ledger.contains_key(&assign.task.id) {
                    self.shared.counts.count_task();
                }
                Some(AgentEvent::Assign(assign))
            }
            CloudMessage::ResultAck { task } => Some(AgentEvent::ResultAck(task)),
            CloudMessage::Cancel { task, reason } => Some(AgentEvent::Cancel { task, reason }),
            CloudMessage::Welcome(_)
            | CloudMessage::Unpin { .. }
            | CloudMessage::Settings(_)
            | CloudMessage::Sources(_)
            | CloudMessage::Trust(_)
            | CloudMessage::Goaway { .. }
            | CloudMessage::Other => None,
        }
    }

    /// Lets the agent handle the events, and all that follow from them immediately.
    async fn handle_events(&mut self, mut events: VecDeque<AgentEvent>) {
        while let Some(event) = events.pop_front() {
            let now = Now { monotonic: Instant::now(), wall: SystemTime::now(), boot: None };
            for effect in self.agent.handle(event, now) {
                match effect {
                    AgentEffect::Persist(record) => {
                        events.push_back(AgentEvent::Persisted(record.id().clone()));
                        self.ledger.insert(record.id().clone(), *record);
                    }
                    AgentEffect::Forget(task) => _ = self.ledger.remove(&task),
                    AgentEffect::Send(message) => self.send(message).await,
                    AgentEffect::Start(work) => self.machine.start_task(*work, now.monotonic, &mut events),
                    AgentEffect::Renew(task, terms) => self.machine.renew_terms(&task, terms),
                    // The simulated machine has no images to remove.
                    AgentEffect::MayRemove(_) => {}
                    AgentEffect::Stop { task, reason } => {
                        self.machine.stop_task(&task, &reason, now.monotonic, &mut events);
                    }
                }
            }
        }
        let tasks = self.agent.len();
        self.shared.counts.tasks.fetch_add(tasks, Ordering::SeqCst);
        self.shared.counts.tasks.fetch_sub(self.tasks, Ordering::SeqCst);
        self.tasks = tasks;
    }

    /// Sends a message like a real edge: progress only if the queue has room, all other messages always.
    async fn send(&mut self, message: EdgeMessage) {
        self.shared.counts.sent_messages.fetch_add(1, Ordering::Relaxed);
        let Some(TunnelTask { link, .. }) = &self.tunnel else { return };
        match message {
            EdgeMessage::Progress(_) => link.try_send(message),
            message => link.send(message).await,
        }
    }

    fn set_connected(&mut self, connected: bool) {
        let FleetCounters { connected: count, present, sessions, .. } = &*self.shared.counts;
        let before = std::mem::replace(&mut self.connected, connected);
        if before != connected {
            count.send_modify(|count| if connected { *count += 1 } else { *count -= 1 });
        }
        if connected && !before {
            sessions.fetch_add(1, Ordering::SeqCst);
            present.send_modify(|(call, count)| {
                if std::mem::replace(&mut self.called, *call) != *call {
                    *count += 1;
                }
            });
            self.plan_faults(Instant::now());
        }
        if !connected {
            self.faults.disconnect = None;
        }
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}
