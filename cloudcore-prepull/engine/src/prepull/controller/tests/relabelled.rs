//! Nodes that are relabelled while a job runs, so that other overriders match them.

use super::*;

fn in_region(name: &str, region: &str) -> NodeView {
    let mut node = edge(name);
    node.labels.insert("region".to_owned(), region.to_owned());
    node
}

fn spec(retry: u32) -> serde_json::Value {
    let rules = |region: &str| {
        json!({"imagePrePullOverrider": {
            "nodeLabel": format!("region={region}"),
            "overriders": {
                "imageOverriders": [{"component": "Registry", "operator": "replace", "value": format!("{region}.io")}],
                "secretOverriders": [{"component": "SecretName", "operator": "add", "value": format!("ns/{region}")}],
            },
        }})
    };
    json!({"imagePrePullOverriders": [rules("a"), rules("b")], "retry": retry})
}

#[test]
fn relabelling_affects_only_the_next_attempt() {
    let template = json!({"nodeNames": ["n"], "failureTolerate": "0", "images": ["app:v1", "db:v1"]});
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Node(in_region("n", "a")));
    world.up("n", &[]);
    world.give(with_spec(template.clone(), spec(0), 1, None));
    world.pass(1_000);
    let sent = ["a.io/app:v1 ns/a", "a.io/db:v1 ns/a"];
    assert_eq!(world.pulls, sent);
    let stored = world.status().clone();
    world.boot(&[]);
    world.pulls.clear();
    world.hear(FleetEvent::Node(in_region("n", "b")));
    world.give(with_spec(template.clone(), spec(0), 1, Some(&stored)));
    world.up("n", &[(UID, 1, OpenPhase::NeedsKeys)]);
    assert_eq!(world.pulls, sent);
    let mut half = result(TaskOutcome::Failed);
    half.images = vec![result(TaskOutcome::Succeeded).images[0].clone(), half.images[0].clone()];
    world.says("n", EdgeMessage::Result(half));
    world.pass(1_000);
    assert_eq!(world.status().phase, JobPhase::Failure);
    // What was pulled under another name is not there.
    world.pulls.clear();
    world.there.clear();
    world.give(with_spec(template, spec(1), 2, None));
    world.pass(1_000);
    assert_eq!(world.pulls, ["b.io/app:v1 ns/b", "b.io/db:v1 ns/b"]);
    assert_eq!(
        (&world.there[0], world.record("n").image_status[0].pulled_image.as_str()),
        (&vec![], "b.io/app:v1")
    );
}

#[test]
fn waiting_plans_follow_labels() {
    let template = json!({"nodeNames": ["n"], "images": ["app:v1", "db:v1"]});
    let mut world = World::new(&[]);
    world.hear(FleetEvent::Node(in_region("n", "a")));
    world.give(with_spec(template, spec(0), 1, None));
    world.pass(1_000);
    world.hear(FleetEvent::Node(in_region("n", "b")));
    world.up("n", &[]);
    world.pass(1_000);
    assert_eq!(world.pulls, ["b.io/app:v1 ns/b", "b.io/db:v1 ns/b"]);
}
