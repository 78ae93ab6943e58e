//! One simulated edge: carries out what the real agent decides, without a disk and without a runtime.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use edgecore_prepull::agent::{Agent, Effect, Event, Now, TaskEnd, Work};
use edgecore_prepull::identity::Identity;
use edgecore_prepull::tunnel::{Link, TunnelEvent, dial};
use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, TaskId, TaskOutcome};
use prepull_api::wire::{CloudMessage, Hello};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Counts;

/// Messages that wait for the tunnel; as many as an edge has tasks in these tests, and some.
const QUEUE: usize = 16;
/// What a simulated image has as its digest.
const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";

pub(super) struct Edge {
    agent: Agent,
    pull: Duration,
    fails: bool,
    counts: Arc<Counts>,
    connected: bool,
    /// Image by task and index, once it was pulled.
    pulled: HashSet<(TaskId, usize)>,
    tasks: usize,
}

impl Edge {
    pub(super) fn new(pull: Duration, fails: bool, counts: Arc<Counts>) -> Self {
        Self {
            agent: Agent::new(NonZeroU32::MIN),
            pull,
            fails,
            counts,
            connected: false,
            pulled: HashSet::new(),
            tasks: 0,
        }
    }

    /// Until it is told to end.
    pub(super) async fn run(
        mut self,
        identity: Identity,
        url: String,
        shutdown: CancellationToken,
        tasks: TaskTracker,
    ) {
        let (link, outgoing) = Link::new(QUEUE);
        let (events, mut tunnel) = mpsc::channel(QUEUE);
        let (ended, mut pulls) = mpsc::channel(QUEUE);
        tasks.spawn(dial::run(identity, url, events, outgoing, shutdown.clone()));
        loop {
            let tick = self.agent.next_tick();
            let event = tokio::select! {
                () = shutdown.cancelled() => break,
                Some(event) = tunnel.recv() => match self.heard(event) {
                    Some(event) => event,
                    None => continue,
                },
                Some(event) = pulls.recv() => event,
                () = sleep_until(tick) => Event::Tick,
            };
            self.take(event, &link, &ended).await;
        }
        self.is_connected(false);
    }

    /// What the tunnel says, in the agent's terms.
    fn heard(&mut self, event: TunnelEvent) -> Option<Event> {
        match event {
            TunnelEvent::Connecting(answer) => {
                let hello = Hello {
                    version: "simulated".to_owned(),
                    os: "linux".to_owned(),
                    arch: "amd64".to_owned(),
                    runtime: Some("simulated 1".to_owned()),
                    image_filesystem: None,
                    max_tasks: Some(self.agent.max_tasks().get()),
                    open: self.agent.open_tasks(),
                };
                let _ = answer.send(hello); // the attempt is over: so is the question
                None
            }
            TunnelEvent::Connected(_) => {
                self.is_connected(true);
                Some(Event::Connected)
            }
            TunnelEvent::Disconnected => {
                self.is_connected(false);
                Some(Event::Disconnected)
            }
            TunnelEvent::Message(CloudMessage::Assign(assign)) => Some(Event::Assign(assign)),
            TunnelEvent::Message(CloudMessage::ResultAck { task }) => Some(Event::ResultAck(task)),
            TunnelEvent::Message(CloudMessage::Cancel { task, reason }) => {
                Some(Event::Cancel { task, reason })
            }
            TunnelEvent::Message(CloudMessage::Welcome(_) | CloudMessage::Goaway { .. }) => None,
        }
    }

    /// One event, and all that follows from it at once.
    async fn take(&mut self, event: Event, link: &Link, ended: &mpsc::Sender<Event>) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = Now { monotonic: Instant::now(), wall: SystemTime::now() };
            for effect in self.agent.handle(event, now) {
                match effect {
                    Effect::Persist(record) => events.push_back(Event::Persisted(record.id().clone())),
                    Effect::Send(message) => link.send(message).await,
                    Effect::Start(work) => self.start(*work, &mut events, ended),
                    Effect::Stop { task, reason } => events.push_back(stopped(task, reason)),
                    Effect::Forget(_) | Effect::Renew(..) => {}
                }
            }
        }
        let tasks = self.agent.len();
        self.counts.tasks.fetch_add(tasks, Ordering::SeqCst);
        self.counts.tasks.fetch_sub(self.tasks, Ordering::SeqCst);
        self.tasks = tasks;
    }

    fn start(&mut self, work: Work, events: &mut VecDeque<Event>, ended: &mpsc::Sender<Event>) {
        let task = work.task.id.clone();
        for (index, done) in work.done.iter().enumerate() {
            let again = done.is_none() && !self.pulled.insert((task.clone(), index));
            self.counts.pulls.fetch_add(u64::from(done.is_none()), Ordering::SeqCst);
            self.counts.twice.fetch_add(u64::from(again), Ordering::SeqCst);
        }
        let images =
            u32::try_from(work.done.iter().filter(|done| done.is_none()).count()).unwrap_or(u32::MAX);
        let running = self.counts.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.counts.most_running.fetch_max(running, Ordering::SeqCst);
        let end = Event::Ended(task, if self.fails { failed(&work) } else { succeeded(work) });
        if self.pull.is_zero() {
            self.counts.running.fetch_sub(1, Ordering::SeqCst);
            return events.push_back(end);
        }
        let (ended, pull, counts) = (ended.clone(), self.pull * images, Arc::clone(&self.counts));
        tokio::spawn(async move {
            tokio::time::sleep(pull).await;
            counts.running.fetch_sub(1, Ordering::SeqCst);
            let _ = ended.send(end).await; // the edge has ended before its pull
        });
    }

    fn is_connected(&mut self, connected: bool) {
        let before = std::mem::replace(&mut self.connected, connected);
        if before != connected {
            self.counts.connected.send_modify(|count| if connected { *count += 1 } else { *count -= 1 });
        }
    }
}

fn succeeded(work: Work) -> TaskEnd {
    let pulled = || ImageResult {
        outcome: ImageOutcome::Pulled,
        digest: Some(DIGEST.to_owned()),
        reason: String::new(),
        bytes: None,
        attempts: 1,
    };
    TaskEnd {
        outcome: TaskOutcome::Succeeded,
        reason: String::new(),
        check: Some(CheckOutcome { passed: true, reason: String::new() }),
        images: work.done.into_iter().map(|done| done.unwrap_or_else(pulled)).collect(),
    }
}

fn failed(work: &Work) -> TaskEnd {
    const REASON: &str = "simulated: the registry is away";
    let failed = ImageResult {
        outcome: ImageOutcome::Failed,
        digest: None,
        reason: REASON.to_owned(),
        bytes: None,
        attempts: 1,
    };
    TaskEnd {
        outcome: TaskOutcome::Failed,
        reason: REASON.to_owned(),
        check: Some(CheckOutcome { passed: true, reason: String::new() }),
        images: vec![failed; work.done.len()],
    }
}

fn stopped(task: TaskId, reason: String) -> Event {
    Event::Crashed { task, reason }
}

async fn sleep_until(tick: Option<Instant>) {
    match tick {
        Some(tick) => tokio::time::sleep_until(tick.into()).await,
        None => std::future::pending().await,
    }
}
