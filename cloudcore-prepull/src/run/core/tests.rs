#![allow(clippy::unwrap_used)]
use hyper::{Request, Response};
use kube::Client;
use kube::client::Body;
use prepull_api::task::JobUid;
use prepull_engine::prepull::controller::{Content, StatusOrReport};
use prepull_engine::shared::outcomes::WriteOutcome;
use prepull_engine::sites::SiteSettings;

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// A core that panics at any request to the API server.
fn core(inputs: mpsc::Sender<Input>) -> Core {
    async fn panics(_: Request<Body>) -> Result<Response<Body>, std::convert::Infallible> {
        panic!("on purpose")
    }
    let client = Client::new(tower::service_fn(panics), "default");
    let events = Events::start(client.clone());
    Core {
        engine: Engine::default(),
        recorder: None,
        clock: Clock::start(),
        roster: Roster::in_memory(),
        kruise_nodes: None,
        sites: SiteSettings::default(),
        sessions: Sessions::default(),
        secrets: Secrets::new(client.clone(), true),
        kruise_writer: kruise_writer::KruiseWriter::new(client.clone()),
        writer: StatusWriter::new(client.clone(), events.clone()),
        settings_writer: SettingsWriter::new(client.clone()),
        recalls: Recalls::new(client),
        events,
        leadership: Leadership::undisputed(),
        metrics: Arc::default(),
        traces: None,
        inputs,
        needs_pods: watch::Sender::default(),
        asked: mpsc::channel(1).1,
        known_since: Timestamp::UNIX_EPOCH,
        work: JoinSet::new(),
        vital: Vital::default(),
        site_log: SiteLog::new(&SiteSettings::default()),
    }
}

#[tokio::test]
async fn a_write_that_panics_counts_as_failed() {
    let (inputs, mut receiver) = mpsc::channel(1);
    let job = JobUid("u".to_owned());
    let content = Content::Status(Box::default());
    let mut core = core(inputs);
    let (name, replaces) = ("nginx".to_owned(), None);
    core.act_for_job(controller::Action::Write { job, name, version: 7, replaces, content });
    let input = tokio::time::timeout(SOON, receiver.recv()).await.unwrap().unwrap();
    assert!(
        matches!(
            input,
            Input::Prepull(controller::Input::Written {
                object: StatusOrReport::Status,
                version: 7,
                outcome: WriteOutcome::Failed,
                ..
            })
        ),
        "{input:?}"
    );
}

#[tokio::test]
async fn the_end_waits_for_no_full_inbox() {
    let (inputs, mut inbox) = mpsc::channel(1);
    let mut core = core(inputs.clone());
    let mut listeners = JoinSet::new();
    for tasks in [&mut core.work, &mut listeners] {
        for _ in 0..3 {
            let inputs = inputs.clone();
            tasks.spawn(async move { inputs.send(Input::Tick).await.unwrap() });
        }
    }
    tokio::time::timeout(SOON, core.drain(&mut inbox, &mut listeners)).await.unwrap();
}

#[tokio::test]
async fn a_dead_vital_task_ends_the_core() {
    let (inputs, mut inbox) = mpsc::channel(1);
    let (mut core, shutdown) = (core(inputs), CancellationToken::new());
    core.vital.guard("the watch of nodes", async {}).await;
    let ended = tokio::time::timeout(SOON, core.run_until(&mut inbox, |_| false, &shutdown)).await;
    let error = ended.unwrap().unwrap_err();
    assert!(error.to_string().starts_with("the watch of nodes has ended"), "{error}");
    shutdown.cancel();
    core.run_until(&mut inbox, |_| false, &shutdown).await.unwrap();
}
