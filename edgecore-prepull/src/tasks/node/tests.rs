#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::num::NonZeroU64;
use std::time::Duration;

use prepull_api::download::{DownloadTerms, Window};
use prepull_api::failure::FailureCode;
use prepull_api::settings::NodeSettings;
use prepull_api::task::{CheckItem, ImageTask, JobUid, PullPolicy, Task, TaskOutcome, TaskResult};
use prepull_api::wire::{Assign, OpenPhase, PullKey, Welcome};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;
use crate::images::puller::fake::{Act, Fake};
use crate::images::site::Hub;
use crate::settings::Own;
use crate::tasks::ledger::RecordStore as _;
use crate::tasks::ledger::memory::MemoryStore;
use crate::upgrade::Obstacles;

/// A node with the far end of its tunnel.
struct Harness {
    events: mpsc::Sender<TunnelEvent>,
    said: mpsc::Receiver<EdgeMessage>,
    shutdown: CancellationToken,
    node: JoinHandle<()>,
    /// The directory of the cloud's settings.
    settings: TempDir,
}

impl Harness {
    fn start(fake: &Arc<Fake>, store: &MemoryStore) -> Self {
        let settings = tempfile::tempdir().unwrap();
        let config = NodeConfig {
            upgrades: Arc::new(Upgrades::new(&PathBuf::new(), Obstacles::default())),
            max_tasks: NonZeroU32::MIN,
            parallel_pulls: NonZeroUsize::new(2).unwrap(),
            limits: CheckLimits::default(),
            clock: NodeWindows { time_zone: Some("Asia/Tokyo".to_owned()), ..NodeWindows::default() },
            providers: Arc::default(),
            hub: Arc::new(Hub::new(Duration::from_secs(60), Arc::default())),
            kubelet_dir: "/nonexistent".into(),
            settings: Arc::new(CloudSettings::load(settings.path(), Own::unlimited())),
        };
        let records = RecordWriter::within_the_runtime(store.clone());
        let node = NodeAgent::new(fake.clone(), records, config, Arc::default());
        let (events, receiver) = mpsc::channel(4);
        let (link, said) = TunnelSender::new(4);
        let shutdown = CancellationToken::new();
        let node = tokio::spawn(node.run(receiver, link, shutdown.clone()));
        Self { events, said, shutdown, node, settings }
    }

    /// Begins a session, and returns the `Hello` of the node.
    async fn connect(&self) -> Hello {
        self.connect_to(None).await
    }

    /// Begins a session with a cloud that asks for reports at this interval.
    async fn connect_to(&self, state_interval: Option<Duration>) -> Hello {
        let (answer, hello) = oneshot::channel();
        self.events.send(TunnelEvent::Connecting(answer)).await.unwrap();
        let hello = hello.await.unwrap();
        let second = Duration::from_secs(1);
        let welcome = Welcome {
            session: "s".to_owned(),
            heartbeat: second,
            progress_interval: second,
            state_interval,
            tickets: None,
        };
        self.events.send(TunnelEvent::Connected(welcome)).await.unwrap();
        hello
    }

    async fn tell(&self, message: CloudMessage) {
        self.events.send(TunnelEvent::Message(message)).await.unwrap();
    }

    /// Waits for the next message that is not progress.
    async fn hear(&mut self) -> EdgeMessage {
        loop {
            match self.said.recv().await.unwrap() {
                EdgeMessage::Progress(_) => {}
                message => return message,
            }
        }
    }

    async fn result(&mut self) -> TaskResult {
        match self.hear().await {
            EdgeMessage::Result(result) => result,
            other => panic!("{other:?}"),
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.node.await.unwrap();
    }
}

fn assign(images: &[&str]) -> CloudMessage {
    let image = |name: &&str| ImageTask { policy: PullPolicy::Always, ..ImageTask::new(name) };
    let task = Task { title: "job".to_owned(), ..Task::new(id(), images.iter().map(image).collect()) };
    CloudMessage::Assign(Assign {
        task,
        remaining: Duration::from_secs(300),
        keys: vec![PullKey::anonymous()],
        download: DownloadTerms::default(),
    })
}

#[tokio::test(start_paused = true)]
async fn unknown_parts_of_a_task_fail_it() {
    const REMEDY: &str = "update edgecore-prepull on this node";
    let assignment = |change: fn(&mut Assign)| {
        let CloudMessage::Assign(mut assign) = assign(&["a"]) else { panic!("another message") };
        change(&mut assign);
        CloudMessage::Assign(assign)
    };
    let changes: [(fn(&mut Assign), _); 3] = [
        (|assign| assign.task.checks = vec![CheckItem::Other], FailureCode::CheckFailed),
        (|assign| assign.task.images[0].policy = PullPolicy::Other, FailureCode::Internal),
        (|assign| assign.keys = vec![PullKey::Other], FailureCode::SecretUnusable),
    ];
    for (change, code) in changes {
        let (fake, store) = (Fake::new(), MemoryStore::default());
        let mut harness = Harness::start(&fake, &store);
        harness.connect().await;
        harness.tell(CloudMessage::Other).await;
        harness.tell(assignment(change)).await;
        assert_eq!(harness.hear().await, EdgeMessage::Accepted { task: id() });
        let result = harness.result().await;
        assert_eq!((result.outcome, result.images[0].code), (TaskOutcome::Failed, Some(code)), "{result:?}");
        assert!(result.reason.contains(REMEDY), "{result:?}");
        assert!(fake.state.lock().unwrap().pulls.is_empty(), "nothing is pulled");
        harness.stop().await;
    }
}

fn id() -> TaskId {
    TaskId { job: JobUid("job".to_owned()), attempt: 1 }
}

#[tokio::test(start_paused = true)]
async fn a_task_runs_until_acknowledged() {
    let (fake, mut store) = (Fake::new(), MemoryStore::default());
    let mut harness = Harness::start(&fake, &store);
    let hello = harness.connect().await;
    assert_eq!((hello.runtime.as_deref(), hello.open.len()), (Some("fake 1"), 0));
    assert_eq!(hello.image_filesystem.unwrap().mountpoint, "/images");

    harness.tell(assign(&["a", "b", "c"])).await;
    assert_eq!(harness.hear().await, EdgeMessage::Accepted { task: id() });
    let result = harness.result().await;
    assert_eq!(result.outcome, TaskOutcome::Succeeded);
    assert_eq!(store.load().unwrap()[0].result.as_ref(), Some(&result), "on the disk when it is sent");

    // The session breaks before the acknowledgement.
    harness.events.send(TunnelEvent::Disconnected).await.unwrap();
    assert_eq!(harness.connect().await.open[0].phase, OpenPhase::Finished);
    assert_eq!(harness.result().await, result);
    harness.tell(CloudMessage::ResultAck { task: id() }).await;
    assert_eq!(harness.connect().await.open, []);
    harness.stop().await;
    assert_eq!(store.load().unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_node_repeats_no_image() {
    let (fake, store) = (Fake::new(), MemoryStore::default());
    fake.script("long", [Act::Take(1000)]);
    let mut harness = Harness::start(&fake, &store);
    harness.connect().await;
    harness.tell(assign(&["short", "long"])).await;
    harness.hear().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    harness.stop().await;
    assert_eq!(fake.state.lock().unwrap().dropped, ["long"], "the pull was stopped in the runtime");

    let mut harness = Harness::start(&fake, &store);
    assert_eq!(harness.connect().await.open[0].phase, OpenPhase::NeedsKeys);
    harness.tell(assign(&["short", "long"])).await;
    assert_eq!(harness.hear().await, EdgeMessage::Accepted { task: id() });
    assert_eq!(harness.result().await.outcome, TaskOutcome::Succeeded);
    assert_eq!(fake.pulls(), ["short", "long", "long"], "an image that was complete is not pulled again");
}

#[tokio::test(start_paused = true)]
async fn without_a_cloud_the_deadline_ends_tasks() {
    let (fake, store) = (Fake::new(), MemoryStore::default());
    fake.script("long", [Act::Take(1000)]);
    let mut harness = Harness::start(&fake, &store);
    harness.connect().await;
    harness.tell(assign(&["long"])).await;
    harness.hear().await;
    harness.stop().await;

    let mut harness = Harness::start(&fake, &store);
    tokio::time::sleep(Duration::from_secs(310)).await;
    assert_eq!(harness.connect().await.open[0].phase, OpenPhase::Finished);
    assert_eq!(harness.result().await.outcome, TaskOutcome::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_task_stops_and_reports() {
    let (fake, store) = (Fake::new(), MemoryStore::default());
    fake.script("long", [Act::Take(1000)]);
    let mut harness = Harness::start(&fake, &store);
    harness.connect().await;
    harness.tell(assign(&["long"])).await;
    harness.hear().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    harness.tell(CloudMessage::Cancel { task: id(), reason: "job deleted".to_owned() }).await;
    assert_eq!(harness.result().await.outcome, TaskOutcome::Cancelled);
    assert_eq!(fake.state.lock().unwrap().dropped, ["long"]);
}

#[tokio::test(start_paused = true)]
async fn an_executors_panic_fails_its_task() {
    let (fake, store) = (Fake::new(), MemoryStore::default());
    fake.script("bug", [Act::Panic]);
    let mut harness = Harness::start(&fake, &store);
    harness.connect().await;
    harness.tell(assign(&["bug"])).await;
    harness.hear().await;
    let result = harness.result().await;
    assert_eq!(result.outcome, TaskOutcome::Failed);
    assert!(result.reason.contains("died"), "{}", result.reason);
}

#[tokio::test(start_paused = true)]
async fn every_hello_lists_the_pins() {
    let fake = Fake::new();
    let harness = Harness::start(&fake, &MemoryStore::default());
    assert_eq!(harness.connect().await.pins, Some(Vec::new()), "the agent can pin");
    let [over, lives] = ["over", "lives"].map(|uid| JobUid(uid.to_owned()));
    for job in [&over, &lives] {
        assert!(!fake.pin("image", None, job).await.unwrap());
    }
    assert_eq!(harness.connect().await.pins, Some(vec![over.clone(), lives.clone()]));
    harness.tell(CloudMessage::Unpin { jobs: [over].into() }).await;
    harness.tell(CloudMessage::Unpin { jobs: [].into() }).await;
    assert_eq!(harness.connect().await.pins, Some(vec![lives]));
    harness.stop().await;
}

#[tokio::test(start_paused = true)]
async fn changes_are_reported_only_on_request() {
    let fake = Fake::new();
    let mut harness = Harness::start(&fake, &MemoryStore::default());
    harness.connect_to(Some(Duration::from_secs(60))).await;
    let EdgeMessage::State(state) = harness.hear().await else { panic!("no state") };
    assert_eq!(state.runtime.as_deref(), Some("fake 1"));
    let disk = state.image_filesystem.unwrap();

    // Nothing has changed; then the disk fills up.
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(harness.said.try_recv().is_err());
    fake.state.lock().unwrap().free = disk.available / 2;
    let EdgeMessage::State(state) = harness.hear().await else { panic!("no state") };
    assert_eq!(state.image_filesystem.unwrap().available, disk.available / 2);

    harness.events.send(TunnelEvent::Disconnected).await.unwrap();
    harness.connect().await; // of a cloud that does not ask
    fake.state.lock().unwrap().free = 0;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(harness.said.try_recv().is_err());
    harness.stop().await;
}

#[tokio::test(start_paused = true)]
async fn settings_of_the_cloud_hold_for_running_tasks() {
    let (fake, store) = (Fake::new(), MemoryStore::default());
    fake.state.lock().unwrap().leftovers = true;
    fake.script("long", [Act::Take(1000)]);
    let mut harness = Harness::start(&fake, &store);
    assert_eq!(harness.connect().await.settings, Some(NodeSettings::default()));
    harness.tell(assign(&["long"])).await;
    harness.hear().await;
    let windows = vec![Window::never()];
    let max_download_rate = NonZeroU64::new(4096);
    let keep_unfinished = Some(Duration::from_secs(60));
    let settings = NodeSettings {
        max_download_rate,
        windows: windows.clone(),
        keep_unfinished,
        ..NodeSettings::default()
    };
    // A full disk: it isn't confirmed before it's written.
    let (dir, aside) = (harness.settings.path().to_owned(), harness.settings.path().with_extension("aside"));
    std::fs::rename(&dir, &aside).unwrap();
    harness.tell(CloudMessage::Settings(settings.clone())).await;
    let waits = loop {
        match harness.said.recv().await.unwrap() {
            EdgeMessage::Progress(progress) if progress.waits.is_empty() => {}
            EdgeMessage::Progress(progress) => break progress.waits,
            other => panic!("{other:?}"),
        }
    };
    assert!(waits.contains("window"), "{waits}");
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert!(harness.said.try_recv().is_err(), "it isn't written");
    let kept = fake.state.lock().unwrap().released.last().map(|(_, least_age)| *least_age);
    assert_eq!(kept, keep_unfinished, "what an unfinished pull has left");
    std::fs::rename(&aside, &dir).unwrap();
    let answer = harness.hear().await;
    assert_eq!(answer, EdgeMessage::Configured { settings: settings.clone(), windows: windows.clone() });
    let hello = harness.connect().await;
    assert_eq!((hello.settings, hello.windows), (Some(settings), windows));
    // Without them the task goes on.
    harness.tell(CloudMessage::Settings(NodeSettings::default())).await;
    loop {
        match harness.hear().await {
            EdgeMessage::Configured { windows, .. } => assert!(windows.is_empty()),
            EdgeMessage::Result(result) => {
                assert_eq!(result.outcome, TaskOutcome::Succeeded);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
}
