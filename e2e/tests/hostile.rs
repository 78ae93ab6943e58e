//! A node with a good certificate that means ill, while other edges are in the middle of a job: they are done in
//! time and right, keep their sessions, and the cloud keeps its memory.

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures::future::join_all;
use prepull_api::task::{
    CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, JobUid, TaskId, TaskOutcome,
    TaskResult,
};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_MESSAGE, OpenPhase, OpenTask, Progress};
use prepull_e2e::prelude::*;
use tokio_tungstenite::tungstenite::Message;

/// Honest edges: five rounds of the job's concurrency.
const HONEST: usize = 25;
const AT_A_TIME: i64 = 5;
/// What the cloud may grow by under attack: 512 handshakes (TLS, with its certificates and buffers, takes some ten
/// KiB), four connections of the attacker's node with at most 4 MiB each of what waits for it and 1 MiB of a message
/// that comes in, and what the allocator keeps of it.
const MEMORY: u64 = 64 * MIB;
/// For the honest edges' job, which takes five seconds alone.
const IN_TIME: Duration = Duration::from_secs(30);
/// A round of what has no end of its own.
const BURST: Duration = Duration::from_secs(3);
/// Messages of one session that the controller may get to see at once, and in a second: what a session is allowed (400,
/// and 150 a second), and what the honest edges say meanwhile. Unbounded it would be ten thousands.
const TAKEN_IN: (f64, f64) = (400.0 + 200.0, 150.0 + 150.0);
/// Nearly twice as many as there are places for handshakes.
const CONNECTIONS: usize = 1000;
/// For a session that begins while others hold these: two turns of a second each, and a busy machine.
const LET_IN: Duration = Duration::from_secs(6);

/// Honest edges that work on a job, and somebody else.
struct Scene {
    // In the order in which they stop.
    fleet: Fleet,
    cloud: Cloud,
    cluster: Cluster,
    intruder: Intruder,
    memory: u64,
}

impl Scene {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start().await?;
        let cloud = Cloud::start(&cluster).args(&["--heartbeat", "2s"]).await?;
        let fleet = Fleet::start(&cluster, &cloud, HONEST).pulls_take(Duration::from_millis(500)).await?;
        cluster.edge_nodes(&["intruder"]).await?;
        let intruder = Intruder::of(&cluster, &cloud, "intruder").await?;
        // The first job of a cloud warms up what is bounded by other means, such as its allocator.
        let warm = cluster.job("warm").images(["harbor.example/warm:v1"]).on(fleet.names());
        warm.concurrency(25).completes().await?;
        let memory = cloud.process()?.memory()?;
        Ok(Self { fleet, cloud, cluster, intruder, memory })
    }

    /// A session of another node begins, soon, although the attack goes on.
    async fn lets_in_somebody_else(&self) -> Result<()> {
        let honest = Intruder::of(&self.cluster, &self.cloud, "somebody-else").await?;
        let begin = Instant::now();
        honest.open_session().await.context("kept out")?;
        eprintln!("let in after {:?}", begin.elapsed());
        ensure!(begin.elapsed() < LET_IN, "it took {:?}", begin.elapsed());
        Ok(())
    }

    /// Messages and the like that the controller has taken in so far.
    async fn taken_in(&self) -> Result<f64> {
        Ok(self.cloud.metrics().await?.sum("cloudcore_prepull_controller_inputs_total", &[]))
    }

    /// One round of the attack after the other, one at the least, for as long as the honest edges work. The attack is
    /// told the UID of their job.
    async fn under(&self, attack: impl AsyncFn(JobUid) -> Result<()>) -> Result<()> {
        let job = self.cluster.job("honest").images(["harbor.example/a:v1"]).on(self.fleet.names());
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
            "honest job {took:?}, {rounds} rounds in {:?}, {} MiB, at most {} MiB",
            begin.elapsed(),
            self.memory / MIB,
            most / MIB
        );
        assert_eq!((status.summary.desired, status.summary.successful), (25, 25));
        ensure!(!serde_json::to_string(&status)?.contains("forged"), "{status:?}");
        ensure!(most < self.memory + MEMORY, "from {} to {most} bytes", self.memory);
        assert_eq!(self.fleet.pulled_twice(), 0);
        self.fleet.all_acknowledged().await
    }
}

fn task(job: &JobUid, attempt: u32) -> TaskId {
    TaskId { job: job.clone(), attempt }
}

/// That it went well, or badly, with `images` images.
fn result(job: &JobUid, outcome: TaskOutcome, images: usize) -> EdgeMessage {
    let image = ImageResult {
        outcome: ImageOutcome::Failed,
        digest: None,
        id: None,
        reason: "forged".to_owned(),
        bytes: None,
        attempts: 1,
    };
    EdgeMessage::Result(TaskResult {
        task: task(job, 1),
        outcome,
        reason: "forged".to_owned(),
        check: Some(CheckOutcome { passed: false, reason: "forged".to_owned() }),
        images: vec![image; images],
        took: Duration::ZERO,
    })
}

fn progress(job: &JobUid, index: u32) -> EdgeMessage {
    let image = ImageProgress {
        index,
        phase: ImagePhase::Pulling,
        bytes: None,
        attempts: 1,
        reason: "forged".to_owned(),
    };
    EdgeMessage::Progress(Progress { task: task(job, 1), images: vec![image] })
}

#[tokio::test]
async fn garbage_ends_the_session_that_it_came_on_and_no_other() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |_| {
        for frame in [
            Message::text("{"),
            Message::text(r#"{"type":"become_root"}"#),
            Message::text(r#"{"type":"progress","task":{"job":"x"},"images":"all"}"#),
            Message::binary(vec![0xff; 4096]),
            Message::text("x".repeat(2 * MAX_MESSAGE)),
            Message::text("[".repeat(500_000)),
        ] {
            let what = format!("{frame:.20}");
            let mut wire = scene.intruder.open_session().await?;
            let _ = wire.send_frame(frame).await; // the cloud may hang up before the end of it
            let reason = wire.read_to_close().await?;
            // A reason can be lost where the cloud hangs up on what is still on its way.
            let known = ["not a message", "text frames", "at most 1048576"];
            let is_known = reason.is_empty() || known.iter().any(|known| reason.contains(known));
            ensure!(is_known, "{what}: {reason:?}");
        }
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn forged_messages_change_nothing() -> Result<()> {
    let scene = Scene::start().await?;
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
            // Each result is taken off its hands.
            let mut acknowledged = 0;
            while acknowledged < 3 {
                acknowledged += usize::from(matches!(wire.receive().await?, CloudMessage::ResultAck { .. }));
            }
        }
        // No faster than an honest edge may: the flood is another test.
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_hello_that_claims_the_tasks_of_others_gets_none_of_them() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |job: JobUid| {
        let mut wire = scene.intruder.open_websocket().await?;
        let phases = [OpenPhase::NeedsKeys, OpenPhase::Running];
        let open = phases.map(|phase| OpenTask { task: task(&job, 1), phase }).to_vec();
        wire.send_message(&EdgeMessage::Hello(Hello { open, ..Hello::default() })).await?;
        ensure!(matches!(wire.receive().await?, CloudMessage::Welcome(_)));
        for _ in 0..2 {
            let answer = wire.receive().await?;
            ensure!(matches!(answer, CloudMessage::Cancel { .. }), "{answer:?}");
        }
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_node_that_never_reads_costs_a_bounded_queue() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |job: JobUid| {
        let mut wire = scene.intruder.open_session().await?;
        // Each is answered, and no answer is read.
        wire.send_repeatedly(&result(&job, TaskOutcome::Failed, 200), BURST).await;
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_flood_is_held_back() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |job: JobUid| {
        for flood in [progress(&job, 0), result(&job, TaskOutcome::Failed, 1)] {
            let (before, begin) = (scene.taken_in().await?, Instant::now());
            scene.intruder.open_session().await?.send_repeatedly(&flood, BURST).await;
            let (taken, took) = (scene.taken_in().await? - before, begin.elapsed());
            eprintln!("{taken} messages in {took:?}");
            ensure!(taken < TAKEN_IN.0 + TAKEN_IN.1 * took.as_secs_f64(), "{taken} messages in {took:?}");
        }
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_thousand_bare_connections_keep_nobody_out() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |_| {
        let knocks = join_all((0..CONNECTIONS).map(|_| scene.intruder.connect_tcp())).await;
        let open = knocks.iter().filter(|knock| knock.is_ok()).count();
        ensure!(open == CONNECTIONS, "{open} got through: the attack is none");
        scene.lets_in_somebody_else().await
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_thousand_tls_connections_keep_nobody_out() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |_| {
        let honest = async {
            // While they hold all the places: what stalls is cut in the end.
            eventually("others wait for the places of handshakes", SOON, async || {
                let waiting = scene.cloud.metrics().await?.sum("cloudcore_prepull_waiting_connections", &[]);
                ensure!(waiting > 0.5, "none waits: the attack is none");
                Ok(())
            })
            .await?;
            scene.lets_in_somebody_else().await
        };
        let shakes = join_all((0..CONNECTIONS).map(|_| scene.intruder.connect_tls()));
        let (shakes, let_in) = tokio::join!(shakes, honest);
        ensure!(shakes.iter().any(Result::is_ok), "none got through: the attack is none");
        let_in
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_thousand_sessions_of_one_node_keep_nobody_out() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async |_| {
        let sessions = join_all((0..CONNECTIONS).map(|_| scene.intruder.open_session())).await;
        // Of one node, four connections at a time; each new session replaces the one before.
        ensure!(sessions.iter().any(Result::is_ok), "none was welcomed: the attack is none");
        let refused =
            |entry: &Result<Wire>| entry.as_ref().is_err_and(|error| format!("{error:#}").contains("429"));
        ensure!(sessions.iter().any(refused), "no more than four at a time were let in");
        let count = scene.cloud.metrics().await?.sum("cloudcore_prepull_edge_sessions", &[]);
        ensure!(count < 25.0 + 2.5, "{count} sessions");
        scene.lets_in_somebody_else().await
    };
    scene.under(attack).await
}
