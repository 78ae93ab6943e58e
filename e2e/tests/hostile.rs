//! A node with a good certificate that means ill, while other edges are in the middle of a job: they are done in
//! time and right, keep their sessions, and the cloud keeps its memory.

use std::time::{Duration, Instant};

use futures::future::join_all;
use prepull_api::task::{
    CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, JobUid, TaskId, TaskOutcome,
    TaskResult,
};
use prepull_api::wire::{EdgeMessage, Hello, MAX_MESSAGE, Progress};
use prepull_e2e::prelude::*;
use tokio_tungstenite::tungstenite::Message;

/// Honest edges: five rounds of the job's concurrency.
const HONEST: usize = 25;
const AT_A_TIME: i64 = 5;
/// What the cloud may grow by under attack. A session has at most 4 MiB of what waits for it and 1 MiB of a message
/// that comes in; an attacker has one session, and three more connections that are closing or beginning. The rest is
/// the handshakes', 512 of some ten KiB.
const MEMORY: u64 = 32 * MIB;
/// For the honest edges' job, which takes five seconds alone.
const IN_TIME: Duration = Duration::from_secs(30);

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

    /// The attack goes on for as long as the honest edges work.
    async fn under(&self, attack: impl Future<Output = Result<()>>) -> Result<()> {
        let job = self.cluster.job("honest").images(["harbor.example/a:v1"]).on(self.fleet.names());
        let begin = Instant::now();
        let job = job.concurrency(AT_A_TIME).apply().await?.within(IN_TIME);
        let mut most = 0;
        let watch = async {
            loop {
                most = most.max(self.cloud.process()?.memory()?);
                assert_eq!(self.fleet.connected(), HONEST, "a session ended");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let attack = async {
            attack.await?;
            std::future::pending::<Result<()>>().await
        };
        let status = tokio::select! {
            status = job.completes() => status?,
            ended = attack => bail!("the attack ended: {ended:?}"),
            ended = watch => return ended,
        };
        eprintln!(
            "done after {:?}; memory {} MiB, then at most {} MiB",
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

    /// The UID of the honest edges' job, once they work on it.
    async fn job(&self) -> Result<JobUid> {
        let job = self.cluster.existing_job("honest");
        job.exists().await?;
        job.until("it has begun", |status| status.summary.in_progress > 0).await?;
        Ok(JobUid(job.uid().await?))
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
    let attack = async {
        scene.job().await?;
        for round in 0.. {
            let garbage = [
                Message::text("{"),
                Message::text(r#"{"type":"become_root"}"#),
                Message::text(r#"{"type":"progress","task":{"job":"x"},"images":"all"}"#),
                Message::binary(vec![0xff; 4096]),
                Message::text("x".repeat(2 * MAX_MESSAGE)),
                Message::text("[".repeat(500_000)),
            ];
            for frame in garbage {
                let what = format!("{frame:.20}");
                let mut wire = scene.intruder.enter().await?;
                let _ = wire.send(frame).await; // the cloud may hang up before the end of it
                let reason = wire.end().await?;
                // A reason can be lost where the cloud hangs up on what is still on its way.
                let known = ["not a message", "text frames", "at most 1048576", ""];
                ensure!(
                    known.iter().any(|known| reason.contains(known)),
                    "round {round}, {what}: {reason:?}"
                );
            }
        }
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn forged_messages_change_nothing() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async {
        let (job, none) = (scene.job().await?, JobUid("no-such-job".to_owned()));
        let mut wire = scene.intruder.enter().await?;
        loop {
            for job in [&job, &none] {
                for message in [
                    EdgeMessage::Accepted { task: task(job, 1) },
                    EdgeMessage::Accepted { task: task(job, u32::MAX) },
                    progress(job, 0),
                    progress(job, u32::MAX),
                    result(job, TaskOutcome::Failed, 1),
                    result(job, TaskOutcome::Succeeded, 0),
                    result(job, TaskOutcome::Cancelled, 256),
                ] {
                    wire.say(&message).await?;
                }
                // Each result is taken off its hands.
                let mut acknowledged = 0;
                while acknowledged < 3 {
                    acknowledged += usize::from(matches!(
                        wire.hear().await?,
                        prepull_api::wire::CloudMessage::ResultAck { .. }
                    ));
                }
            }
            // No faster than an honest edge may: the flood is another test.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_node_that_never_reads_costs_a_bounded_queue() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async {
        let job = scene.job().await?;
        loop {
            let mut wire = scene.intruder.enter().await?;
            // Each is answered, and no answer is read.
            while wire.say(&result(&job, TaskOutcome::Failed, 200)).await.is_ok() {}
        }
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_flood_of_progress_and_results_is_held_back() -> Result<()> {
    let scene = Scene::start().await?;
    let attack = async {
        let job = scene.job().await?;
        for round in 0_u32.. {
            let mut wire = scene.intruder.enter().await?;
            let flood = if round.is_multiple_of(2) {
                progress(&job, 0)
            } else {
                result(&job, TaskOutcome::Failed, 1)
            };
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(3) && wire.say(&flood).await.is_ok() {}
        }
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_thousand_connections_keep_nobody_out() -> Result<()> {
    const CONNECTIONS: usize = 1000;
    let scene = Scene::start().await?;
    let attack = async {
        scene.job().await?;
        let knocks = join_all((0..CONNECTIONS).map(|_| scene.intruder.knock())).await;
        ensure!(
            knocks.iter().filter(|knock| knock.is_ok()).count() > CONNECTIONS / 2,
            "hardly any got through"
        );
        // Somebody else comes: a session that begins while all of these wait for a handshake.
        let late = Intruder::of(&scene.cluster, &scene.cloud, "late").await?;
        let begin = Instant::now();
        let _wire = late.enter().await.context("kept out by bare connections")?;
        eprintln!("past bare connections after {:?}", begin.elapsed());
        ensure!(begin.elapsed() < Duration::from_secs(10), "it took {:?}", begin.elapsed());
        drop(knocks);

        let shakes = join_all((0..CONNECTIONS).map(|_| scene.intruder.shake())).await;
        let late = Intruder::of(&scene.cluster, &scene.cloud, "later").await?;
        let begin = Instant::now();
        let _wire = late.enter().await.context("kept out by TLS connections")?;
        eprintln!("past TLS connections after {:?}", begin.elapsed());
        ensure!(begin.elapsed() < Duration::from_secs(10), "it took {:?}", begin.elapsed());
        drop(shakes);

        let sessions = join_all((0..CONNECTIONS).map(|_| scene.intruder.enter())).await;
        let open = sessions.iter().filter(|session| session.is_ok()).count();
        // Of one node, four at a time; each new one replaces the one before, which then makes room.
        ensure!(open > 0, "none of the sessions was welcomed");
        let count = scene.cloud.metrics().await?.sum("cloudcore_prepull_edge_sessions", &[]);
        ensure!(count < 25.0 + 2.0 + 1.5, "{count} sessions");
        Ok(())
    };
    scene.under(attack).await
}

#[tokio::test]
async fn a_hello_that_claims_the_tasks_of_others_gets_none_of_them() -> Result<()> {
    use prepull_api::wire::{CloudMessage, OpenPhase, OpenTask};
    let scene = Scene::start().await?;
    let attack = async {
        let job = scene.job().await?;
        let mut wire = scene.intruder.dial().await?;
        let phases = [OpenPhase::NeedsKeys, OpenPhase::Running];
        let open = phases.map(|phase| OpenTask { task: task(&job, 1), phase }).to_vec();
        wire.say(&EdgeMessage::Hello(Hello { open, ..Hello::default() })).await?;
        ensure!(matches!(wire.hear().await?, CloudMessage::Welcome(_)));
        for _ in 0..2 {
            let answer = wire.hear().await?;
            ensure!(matches!(answer, CloudMessage::Cancel { .. }), "{answer:?}");
        }
        Ok(())
    };
    scene.under(attack).await
}
