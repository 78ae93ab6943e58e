//! A hostile node with a valid certificate, while honest edges work on a job: the job must complete in time, the honest
//! sessions must stay up, and the memory of the cloud must stay bounded.

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures::future::join_all;
use prepull_api::task::{
    CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, JobUid, TaskId, TaskOutcome,
    TaskResult,
};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_MESSAGE, OpenPhase, OpenTask, TaskProgress};
use prepull_e2e::prelude::*;
use tokio_tungstenite::tungstenite::Message;

/// Number of honest edges, five times the job's concurrency.
const HONEST: usize = 25;
const AT_A_TIME: i64 = 5;
/// Memory that the cloud may gain under attack: 512 handshakes of some ten KiB each, four connections of the attacker's
/// node with up to 4 MiB of queued messages and 1 MiB of an incoming one each, and overhead of the allocator.
const MEMORY: u64 = 64 * MIB;
/// Limit for the job of the honest edges, which takes five seconds without an attack.
const IN_TIME: Duration = Duration::from_secs(30);
/// Duration of one round of an attack that wouldn't end by itself.
const BURST: Duration = Duration::from_secs(3);
/// Inputs to the controller at once, and in each second: the allowance of one session (400, and 150 a second) and those
/// of the honest edges. Without a limit there would be tens of thousands.
const TAKEN_IN: (f64, f64) = (400.0 + 200.0, 150.0 + 150.0);
/// Connections of an attack, nearly twice as many as the cloud allows to be in a handshake.
const CONNECTIONS: usize = 1000;
/// Limit for a session that begins under attack: it waits for up to two turns of a second each.
const LET_IN: Duration = Duration::from_secs(6);

/// Part of a text that fills a message.
const LONG: &str = "9.9.9-long";

/// Honest edges that work on a job, and a hostile node.
struct Scene {
    // Fields are dropped in this order.
    fleet: Fleet,
    cloud: Cloud,
    cluster: Cluster,
    intruder: Intruder,
    /// What the cloud takes before the first attack.
    memory: u64,
}

impl Scene {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start().await?;
        let cloud = Cloud::start(&cluster).args(&["--heartbeat", "2s"]).await?;
        let fleet = Fleet::start(&cluster, &cloud, HONEST).pulls_take(Duration::from_millis(500)).await?;
        cluster.edge_nodes(&["intruder", "somebody-else"]).await?;
        let intruder = Intruder::of(&cluster, &cloud, "intruder").await?;
        // A first job warms up the allocator, so that its growth is not counted.
        let warm = cluster.job("warm").images(["harbor.example/warm:v1"]).on(fleet.names());
        warm.concurrency(25).completes().await?;
        let memory = cloud.process()?.memory()?;
        Ok(Self { fleet, cloud, cluster, intruder, memory })
    }

    /// Checks that a session of another node can begin during the attack.
    async fn lets_in_somebody_else(&self) -> Result<()> {
        let honest = Intruder::of(&self.cluster, &self.cloud, "somebody-else").await?;
        let begin = Instant::now();
        honest.open_session().await.context("kept out")?;
        eprintln!("let in after {:?}", begin.elapsed());
        ensure!(begin.elapsed() < LET_IN, "it took {:?}", begin.elapsed());
        Ok(())
    }

    /// Reads the number of inputs that the controller has received so far.
    async fn controller_inputs(&self) -> Result<f64> {
        Ok(self.cloud.metrics().await?.sum("cloudcore_prepull_controller_inputs_total", &[]))
    }

    /// Repeats an attack, at least once, as long as the honest edges work. The attack gets the UID of their job, which has
    /// its name.
    async fn under(&self, name: &str, attack: impl AsyncFn(JobUid) -> Result<()>) -> Result<()> {
        let memory = self.memory;
        let job = self.cluster.job(name).images([format!("harbor.example/{name}:v1")]).on(self.fleet.names());
        let job = job.concurrency(AT_A_TIME).apply().await?.within(IN_TIME);
        job.until("it has begun", |status| status.summary.in_progress > 0).await?;
        let uid = JobUid(job.uid().await?);
        let (begin, done) = (Instant::now(), Cell::new(None));
        let honest = Box::pin(async {
            let status = job.completes().await?;
            done.set(Some(begin.elapsed()));
            anyhow::Ok(status)
        });
        let (rounds, most) = (Cell::new(0), Cell::new(0));
        let attack = Box::pin(async {
            while rounds.get() == 0 || done.get().is_none() {
                attack(uid.clone()).await.with_context(|| format!("round {}", rounds.get()))?;
                rounds.set(rounds.get() + 1);
            }
            anyhow::Ok(())
        });
        let watch = async {
            loop {
                most.set(self.cloud.process()?.memory()?.max(most.get()));
                ensure!(self.fleet.connected() == HONEST, "the session of an honest edge ended");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let (status, ()) = tokio::select! {
            both = async { tokio::try_join!(honest, attack) } => both?,
            ended = watch => return ended,
        };
        let (most, rounds, took) = (most.get(), rounds.get(), done.get());
        eprintln!(
            "{name}: honest job {took:?}, {rounds} rounds in {:?}, {} MiB, at most {} MiB",
            begin.elapsed(),
            memory / MIB,
            most / MIB
        );
        assert_eq!((status.summary.desired, status.summary.successful), (25, 25));
        ensure!(!serde_json::to_string(&status)?.contains("forged"), "{status:?}");
        ensure!(most < memory + MEMORY, "from {memory} to {most} bytes");
        assert_eq!(self.fleet.pulled_twice(), 0);
        self.fleet.all_acknowledged().await
    }
}

fn task(job: &JobUid, attempt: u32) -> TaskId {
    TaskId { job: job.clone(), attempt }
}

/// A result with this outcome, for this many images.
fn result(job: &JobUid, outcome: TaskOutcome, images: usize) -> EdgeMessage {
    let image =
        ImageResult { reason: "forged".to_owned(), attempts: 1, ..ImageResult::new(ImageOutcome::Failed) };
    EdgeMessage::Result(TaskResult {
        reason: "forged".to_owned(),
        check: Some(CheckOutcome { passed: false, reason: "forged".to_owned() }),
        images: vec![image; images],
        ..TaskResult::new(task(job, 1), outcome)
    })
}

fn progress(job: &JobUid, index: u32) -> EdgeMessage {
    let image = ImageProgress {
        attempts: 1,
        reason: "forged".to_owned(),
        ..ImageProgress::new(index, ImagePhase::Pulling)
    };
    EdgeMessage::Progress(TaskProgress { task: task(job, 1), images: vec![image], waits: String::new() })
}

async fn garbage_ends_only_its_session(scene: &Scene) -> Result<()> {
    let attack = async |_| {
        for frame in [
            Message::text("{"),
            Message::text(r#"{"type":"progress","task":{"job":"x"},"images":"all"}"#),
            Message::binary(vec![0xff; 4096]),
            Message::text("x".repeat(2 * MAX_MESSAGE)),
            Message::text("[".repeat(500_000)),
        ] {
            let what = format!("{frame:.20}");
            let mut wire = scene.intruder.open_session().await?;
            let _ = wire.send_frame(frame).await; // the cloud may hang up before the end of it
            let reason = wire.read_to_close().await?;
            // The reason can be lost if the cloud closes the connection while data is in transit.
            let known = ["not a message", "text frames", "at most 1048576"];
            let is_known = reason.is_empty() || known.iter().any(|known| reason.contains(known));
            ensure!(is_known, "{what}: {reason:?}");
        }
        Ok(())
    };
    scene.under("garbage", attack).await
}

async fn forged_messages_change_nothing(scene: &Scene) -> Result<()> {
    let attack = async |job: JobUid| {
        let mut wire = scene.intruder.open_session().await?;
        for job in [job, JobUid("no-such-job".to_owned())] {
            for message in [
                EdgeMessage::Accepted { task: task(&job, 1) },
                EdgeMessage::Accepted { task: task(&job, u32::MAX) },
                progress(&job, 0),
                progress(&job, u32::MAX),
                result(&job, TaskOutcome::Failed, 1),
                result(&job, TaskOutcome::Succeeded, 0),
                result(&job, TaskOutcome::Cancelled, 256),
            ] {
                wire.send_message(&message).await?;
            }
            // Every result is acknowledged.
            let mut acknowledged = 0;
            while acknowledged < 3 {
                acknowledged += usize::from(matches!(wire.receive().await?, CloudMessage::ResultAck { .. }));
            }
        }
        // No faster than an honest edge; another test floods.
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok(())
    };
    scene.under("forgeries", attack).await
}

async fn a_hello_gets_no_foreign_tasks(scene: &Scene) -> Result<()> {
    let attack = async |job: JobUid| {
        let mut wire = scene.intruder.open_websocket().await?;
        let phases = [OpenPhase::NeedsKeys, OpenPhase::Running];
        let open = phases.map(|phase| OpenTask { task: task(&job, 1), phase, limited: false }).to_vec();
        let version = LONG.repeat(100_000);
        wire.send_message(&EdgeMessage::Hello(Box::new(Hello { open, version, ..Hello::default() }))).await?;
        ensure!(matches!(wire.receive().await?, CloudMessage::Welcome(_)));
        for _ in 0..2 {
            let answer = wire.receive().await?;
            ensure!(matches!(answer, CloudMessage::Cancel { .. }), "{answer:?}");
        }
        Ok(())
    };
    scene.under("hello", attack).await?;
    ensure!(!scene.cloud.log().contains(&LONG.repeat(100)), "it has filled the log");
    Ok(())
}

async fn a_node_that_never_reads_is_bounded(scene: &Scene) -> Result<()> {
    let attack = async |job: JobUid| {
        let mut wire = scene.intruder.open_session().await?;
        // Every result is answered, and no answer is read.
        wire.send_repeatedly(&result(&job, TaskOutcome::Failed, 200), BURST).await;
        Ok(())
    };
    scene.under("unread", attack).await
}

async fn a_flood_is_held_back(scene: &Scene) -> Result<()> {
    let attack = async |job: JobUid| {
        for flood in [progress(&job, 0), result(&job, TaskOutcome::Failed, 1)] {
            let (before, begin) = (scene.controller_inputs().await?, Instant::now());
            scene.intruder.open_session().await?.send_repeatedly(&flood, BURST).await;
            let (taken, took) = (scene.controller_inputs().await? - before, begin.elapsed());
            eprintln!("{taken} messages in {took:?}");
            ensure!(taken < TAKEN_IN.0 + TAKEN_IN.1 * took.as_secs_f64(), "{taken} messages in {took:?}");
        }
        Ok(())
    };
    scene.under("flood", attack).await
}

async fn connections_keep_no_edge_out(scene: &Scene) -> Result<()> {
    let attack = async |_| {
        let knocks = join_all((0..CONNECTIONS).map(|_| scene.intruder.connect_tcp())).await;
        let open = knocks.iter().filter(|knock| knock.is_ok()).count();
        ensure!(open == CONNECTIONS, "{open} got through: too weak an attack");
        scene.lets_in_somebody_else().await
    };
    scene.under("connections", attack).await
}

async fn handshakes_keep_no_edge_out(scene: &Scene) -> Result<()> {
    let attack = async |_| {
        let honest = async {
            // The connections hold all handshakes until they are cut for stalling.
            eventually("others wait for the places of handshakes", SOON, async || {
                let waiting = scene.cloud.metrics().await?.sum("cloudcore_prepull_waiting_connections", &[]);
                ensure!(waiting > 0.5, "none waits: too weak an attack");
                Ok(())
            })
            .await?;
            scene.lets_in_somebody_else().await
        };
        let shakes = join_all((0..CONNECTIONS).map(|_| scene.intruder.connect_tls()));
        let (shakes, let_in) = tokio::join!(shakes, honest);
        ensure!(shakes.iter().any(Result::is_ok), "none got through: too weak an attack");
        let_in
    };
    scene.under("handshakes", attack).await
}

async fn sessions_keep_no_edge_out(scene: &Scene) -> Result<()> {
    let attack = async |_| {
        let sessions = join_all((0..CONNECTIONS).map(|_| scene.intruder.open_session())).await;
        // A node may have four connections, and each new session replaces the previous one.
        ensure!(sessions.iter().any(Result::is_ok), "none was welcomed: too weak an attack");
        let refused =
            |entry: &Result<Wire>| entry.as_ref().is_err_and(|error| format!("{error:#}").contains("429"));
        ensure!(sessions.iter().any(refused), "no more than four at a time were let in");
        let count = scene.cloud.sessions().await?;
        ensure!(count < 25.0 + 2.5, "{count} sessions");
        scene.lets_in_somebody_else().await
    };
    scene.under("sessions", attack).await
}

#[tokio::test]
async fn no_message_harms_honest_edges() -> Result<()> {
    let scene = Scene::start().await?;
    garbage_ends_only_its_session(&scene).await?;
    forged_messages_change_nothing(&scene).await?;
    a_hello_gets_no_foreign_tasks(&scene).await
}

#[tokio::test]
async fn no_amount_of_messages_harms_honest_edges() -> Result<()> {
    let scene = Scene::start().await?;
    a_node_that_never_reads_is_bounded(&scene).await?;
    a_flood_is_held_back(&scene).await
}

#[tokio::test]
async fn a_thousand_connections_keep_no_edge_out() -> Result<()> {
    let scene = Scene::start().await?;
    connections_keep_no_edge_out(&scene).await?;
    handshakes_keep_no_edge_out(&scene).await?;
    sessions_keep_no_edge_out(&scene).await
}
