#![allow(clippy::unwrap_used)]

use std::collections::HashSet;

use jiff::Timestamp;
use opentelemetry::Value;
use prepull_api::task::{ByteProgress, ImageOutcome, JobUid, NodeName, TaskId, TaskResult};
use prepull_engine::fleet::in_hand::TaskInHand;

use super::*;

const ARRIVED: i64 = 1_800_000_000;

struct Ended {
    node: NodeName,
    known: TaskInHand,
    result: TaskResult,
}

impl Ended {
    fn spans(&self) -> Vec<SpanData> {
        let (known, arrived) = (self.known.clone(), Timestamp::from_second(ARRIVED).unwrap());
        task_spans(&EndedTask { node: &self.node, known, result: &self.result, arrived })
    }
}

/// A task of two images and one that was there, which ended after 30 seconds, ten after its node had started.
fn ended() -> Ended {
    let pulled = ImageResult {
        attempts: 1,
        bytes: Some(ByteProgress { done: 100, total: 100 }),
        from_peers: Some(60),
        facts: PulledBy::Agent.into(),
        took: Some(Duration::from_secs(8)),
        ended: Some(Duration::from_secs(10)),
        ..ImageResult::new(ImageOutcome::Pulled)
    };
    let failed = ImageResult {
        attempts: 4,
        code: Some(FailureCode::NotFound),
        reason: "there is no such tag".to_owned(),
        took: Some(Duration::from_secs(25)),
        ended: Some(Duration::from_secs(30)),
        ..ImageResult::new(ImageOutcome::Failed)
    };
    Ended {
        node: NodeName::from("edge-1"),
        known: TaskInHand {
            job: Some("nightly".to_owned()),
            images: ["r.io/a:1", "r.io/b:1", "r.io/c:1"].map(str::to_owned).to_vec(),
            started: Some(Timestamp::from_second(ARRIVED - 40).unwrap()),
        },
        result: TaskResult {
            reason: "1 of 3 images failed".to_owned(),
            images: vec![pulled, ImageResult::new(ImageOutcome::Present), failed],
            took: Duration::from_secs(30),
            ..TaskResult::new(TaskId { job: JobUid("u".to_owned()), attempt: 2 }, TaskOutcome::Failed)
        },
    }
}

/// The seconds of a span before the arrival of the result.
fn times(span: &SpanData) -> (i64, i64) {
    let second = |time| Timestamp::try_from(time).map(|time: Timestamp| time.as_second() - ARRIVED).unwrap();
    (second(span.start_time), second(span.end_time))
}

fn attribute<'a>(span: &'a SpanData, key: &str) -> Option<&'a Value> {
    span.attributes.iter().find(|pair| pair.key.as_str() == key).map(|pair| &pair.value)
}

#[test]
fn a_trace_has_task_and_image_spans() {
    let spans = ended().spans();
    let shown: Vec<_> = spans.iter().map(|span| (&*span.name, times(span))).collect();
    assert_eq!(
        shown,
        [
            ("pre-pull", (-40, 0)),
            ("on the edge", (-30, 0)),
            ("pull image", (-28, -20)),
            ("pull image", (-25, 0)),
        ]
    );
    let [node, edge, first, second] = &spans[..] else { panic!("{spans:?}") };
    assert!(spans.iter().all(|span| span.span_context.trace_id() == node.span_context.trace_id()));
    assert_eq!(node.parent_span_id, SpanId::INVALID);
    assert_eq!(edge.parent_span_id, node.span_context.span_id());
    assert_eq!([first, second].map(|image| image.parent_span_id), [edge.span_context.span_id(); 2]);

    assert_eq!(node.status, Status::error("1 of 3 images failed"));
    assert_eq!(attribute(node, "k8s.node.name"), Some(&"edge-1".into()));
    assert_eq!(attribute(node, "prepull.job.name"), Some(&"nightly".into()));
    assert_eq!(attribute(node, "error.type"), Some(&"NotFound".into()));
    assert_eq!(first.status, Status::Ok);
    assert_eq!(attribute(first, "container.image.name"), Some(&"r.io/a:1".into()));
    assert_eq!(attribute(first, "prepull.image.bytes"), Some(&100.into()));
    assert_eq!(attribute(first, "prepull.image.bytes_from_peers"), Some(&60.into()));
    assert_eq!(attribute(first, "prepull.image.pulled_by"), Some(&"agent".into()));
    // The index of an image is that of the task, also where one before it was not tried.
    assert_eq!(attribute(second, "container.image.name"), Some(&"r.io/c:1".into()));
    assert_eq!(attribute(second, "prepull.image.tries"), Some(&4.into()));
    assert_eq!(second.status, Status::error("there is no such tag"));
}

#[test]
fn a_repeated_result_makes_equal_spans() {
    let ids = |ended: &Ended| -> Vec<_> {
        ended.spans().iter().map(|span| (span.span_context.trace_id(), span.span_context.span_id())).collect()
    };
    let mut all = ids(&ended());
    assert_eq!(all, ids(&ended()));
    let mut next = ended();
    next.result.task.attempt = 3;
    all.extend(ids(&next));
    let other = Ended { node: NodeName::from("edge-2"), ..ended() };
    all.extend(ids(&other));
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
}

#[test]
fn invented_times_stay_within_the_task() {
    let mut liar = ended();
    liar.known.started = None;
    liar.result.took = Duration::MAX;
    liar.result.images[0].took = Some(Duration::MAX);
    liar.result.images[2].ended = Some(Duration::MAX);
    let in_order = |span: &SpanData| span.start_time <= span.end_time && times(span).1 <= 0;
    assert!(liar.spans().iter().all(in_order));
    // Nothing begins before its node has started.
    liar.known.started = ended().known.started;
    assert!(liar.spans().iter().all(|span| in_order(span) && times(span).0 >= -40));
    liar.result.images.resize(1000, liar.result.images[0].clone());
    assert_eq!(liar.spans().len(), 4, "two images of the task were tried");
    // The clock of this side was set back.
    liar.known.started = Some(Timestamp::from_second(ARRIVED + 60).unwrap());
    assert!(liar.spans().iter().all(in_order));
}
