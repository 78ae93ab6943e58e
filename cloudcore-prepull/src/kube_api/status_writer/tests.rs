#![allow(clippy::unwrap_used)]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::{join_all, pending};
use hyper::{Request, Response};
use kube::client::Body;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_engine::prepull::controller::rest_of;
use tokio::time::timeout;

use super::*;
use crate::kube_api::fake_api::{client_answering, refusal_status};

#[tokio::test]
async fn a_refused_status_write_rereads_the_job() {
    for (generation, is_edited) in [(1, false), (2, true)] {
        let refused = AtomicBool::default();
        let (client, requests) = client_answering(move |target| {
            if target.starts_with("PATCH") && !refused.swap(true, Ordering::Relaxed) {
                return refusal_status(422);
            }
            json!({
                "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
                "metadata": { "name": "a", "uid": "u", "generation": generation, "resourceVersion": "8" },
                "spec": { "imagePrePullTemplate": { "images": ["nginx"] }, "suspend": true },
            })
        });
        let writer = StatusWriter::new(client.clone(), Events::start(client));
        let status =
            ImagePrePullJobStatus { observed_generation: Some(1), ..ImagePrePullJobStatus::default() };
        let content = Content::Status(Box::new(status));
        let written = writer.write(&JobUid("u".to_owned()), "a", Some("7"), &content).await;
        assert_eq!((written.outcome, written.stored.as_deref()), (WriteOutcome::Done, Some("8")));
        let edited = written.edited.as_ref().map(|job| rest_of(job).metadata.generation);
        assert_eq!(edited, is_edited.then_some(Some(2)));
        assert_eq!(requests.lock().unwrap().len(), 3);
    }
}

#[tokio::test]
async fn a_job_edited_meanwhile_isnt_deleted() {
    for (generation, deletes) in [(1, true), (2, false)] {
        let (client, requests) = client_answering(move |_| {
            json!({
                "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": { "name": "a", "uid": "u", "generation": generation, "resourceVersion": "8" },
            })
        });
        let writer = StatusWriter::new(client.clone(), Events::start(client));
        writer.delete(&JobUid("u".to_owned()), "a", 1).await;
        let requests = requests.lock().unwrap();
        let deleted = requests.iter().any(|request| request.starts_with("DELETE"));
        assert_eq!(deleted, deletes, "{requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn few_objects_are_written_at_a_time() {
    let begun = Arc::new(AtomicUsize::default());
    let seen = Arc::clone(&begun);
    let hang = tower::service_fn(move |_: Request<Body>| {
        seen.fetch_add(1, Ordering::Relaxed);
        pending::<Result<Response<Body>, Error>>()
    });
    let client = Client::new(hang, "default");
    let writer = StatusWriter::new(client.clone(), Events::start(client));
    let job = JobUid("u".to_owned());
    for content in [Content::Report(Box::default()), Content::Status(Box::default())] {
        begun.store(0, Ordering::Relaxed);
        let mut writes = join_all((0..2 * WRITES).map(|_| writer.write(&job, "a", None, &content)));
        for (seconds, expected) in [(29, WRITES), (2, 2 * WRITES)] {
            let ended = timeout(Duration::from_secs(seconds), &mut writes).await.is_ok();
            assert!(!ended, "each has 30 s from when it's sent");
            assert_eq!(begun.load(Ordering::Relaxed), expected);
        }
    }
    begun.store(0, Ordering::Relaxed);
    let jobs: Vec<_> = (0..2 * DELETIONS).map(|number| JobUid(number.to_string())).collect();
    // The controller asks twice.
    let mut deletions = join_all(jobs.iter().chain(&jobs).map(|job| writer.delete(job, "a", 1)));
    for (seconds, expected) in [(29, DELETIONS), (2, 2 * DELETIONS)] {
        assert!(timeout(Duration::from_secs(seconds), &mut deletions).await.is_err());
        assert_eq!(begun.load(Ordering::Relaxed), expected);
    }
    timeout(Duration::from_secs(60), deletions).await.unwrap();
    assert!(writer.deleting.lock().is_empty());
}
