//! Recordings of `cloudcore-prepull run --record`, possibly manipulated.

use prepull_engine::engine::Action;
use prepull_engine::recording::{Replay, replay};

pub(crate) fn run(input: &[u8]) {
    let play = || {
        let mut actions = Vec::new();
        let outcome = replay(input, |at, action| {
            check_action(action);
            actions.push(format!("{at} {action:?}"));
        });
        (outcome.map(|Replay { differences, .. }| differences).map_err(|error| error.to_string()), actions)
    };
    assert_eq!(play(), play(), "the same inputs lead to the same actions");
}

/// Checks that the engine's actions can be carried out.
pub(crate) fn check_action(action: &Action) {
    use prepull_api::wire::encode_frame;
    use prepull_engine::kruise::{self, jobs::JobWrite, node_images::NodeImageWrite};
    use prepull_engine::prepull::controller::{self, Content};

    /// An API server takes no larger object, since etcd does not.
    const MAX_OBJECT: usize = 3 * 1024 * 1024 / 2;
    fn assert_fits(object: &impl serde::Serialize) {
        let bytes = serde_json::to_vec(object).expect("an object").len();
        assert!(bytes < MAX_OBJECT, "an object of {bytes} bytes");
    }
    match action {
        Action::Prepull(controller::Action::Write { content: Content::Status(status), .. }) => {
            assert_fits(status);
        }
        Action::Prepull(controller::Action::Write { content: Content::Report(report), .. }) => {
            assert_fits(report);
        }
        Action::Prepull(controller::Action::Send(_, message))
        | Action::Kruise(kruise::Action::Send(_, message)) => {
            assert!(encode_frame(message).is_ok(), "a message that no session takes: {message:?}");
        }
        Action::Kruise(kruise::Action::NodeImage(_, NodeImageWrite::Status { status, .. })) => {
            assert_fits(status);
        }
        Action::Kruise(kruise::Action::NodeImage(_, NodeImageWrite::Spec { spec, .. })) => assert_fits(spec),
        Action::Kruise(kruise::Action::Job(JobWrite::PullJobStatus(_, _, status))) => assert_fits(status),
        Action::Kruise(kruise::Action::Job(JobWrite::ListJobStatus(_, _, status))) => assert_fits(status),
        _ => {}
    }
}
