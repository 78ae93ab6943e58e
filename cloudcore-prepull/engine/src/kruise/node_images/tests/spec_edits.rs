#![allow(clippy::unwrap_used)]
//! Tags that jobs request, and tags that are removed again.

use prepull_api::crd::kruise::SandboxConfig;

use super::*;

fn live(world: &World, job: &str, liveness: Liveness) {
    world.jobs.borrow_mut().insert(JobUid(job.to_owned()), liveness);
}

#[test]
fn a_requested_tag_is_pulled_and_reported() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    let request = Arc::new(request("job"));
    world.request(&request, false);
    let tag = world.spec_tag("nginx", "1.25").unwrap();
    assert_eq!((tag.version, tag.pull_policy.as_ref()), (0, Some(&request.limits)));
    assert_eq!(tag.created_at, Some(Time(world.now)));
    assert_eq!(tag.owner_references.iter().collect::<Vec<_>>(), [&request.owner]);
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Pending)]);
    let task = world.take_dispatched()[0].task.id.clone();
    let at = Timestamp::from_second(world.now.as_second()).unwrap();
    world.end_task(&task, pulled());
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Succeeded(at))]);
    world.request(&request, false);
    assert_eq!(
        world.take_tag_states(),
        [("job".to_owned(), TagState::Succeeded(at))],
        "each request is answered"
    );
    assert_eq!(world.take_dispatched(), []);
}

#[test]
fn a_new_round_raises_the_version() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    let request = Arc::new(request("job"));
    world.request(&request, false);
    let task = world.take_dispatched()[0].task.id.clone();
    world.request(&request, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 0, "the first has not ended");
    world.end_task(&task, failed("no"));
    world.request(&request, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 1);
    assert_eq!(world.take_dispatched()[0].task.id.attempt, 2);
    let tag_states = world.take_tag_states();
    assert_eq!(tag_states.last(), Some(&("job".to_owned(), TagState::Pending)), "{tag_states:?}");
    // Also where a person has removed the tag: the status has its version still.
    world.end_task(&TaskId { attempt: 2, ..task }, failed("no"));
    world.edit_unseen(|spec| spec.images.clear());
    world.request(&request, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 2);
}

#[test]
fn both_owners_learn_the_result() {
    let mut world = World::new();
    for job in ["one", "two"] {
        live(&world, job, Liveness::Active);
        world.request(&Arc::new(request(job)), false);
    }
    let tag = world.spec_tag("nginx", "1.25").unwrap();
    assert_eq!((tag.version, tag.owner_references.len()), (1, 2));
    let first = world.take_dispatched()[0].task.id.clone();
    world.end_task(&first, pulled());
    let second = world.take_dispatched()[0].task.id.clone();
    world.take_tag_states();
    world.end_task(&second, pulled());
    world.pass(Duration::from_secs(1));
    let mut told = world.take_tag_states();
    told.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(
        matches!(told.as_slice(), [(one, TagState::Succeeded(_)), (two, TagState::Succeeded(_))] if one == "one" && two == "two"),
        "{told:?}"
    );
}

#[test]
fn a_changed_request_changes_its_pending_tag() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    world.take_tag_states();
    let mut changed = TagRequest { sandbox: Some(SandboxConfig::default()), ..request("job") };
    changed.limits.timeout_seconds = Some(60);
    world.request(&Arc::new(changed.clone()), false);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().pull_policy.unwrap().timeout_seconds, Some(60));
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Pending)], "it is answered");
    let task = world.take_dispatched().pop().unwrap().task;
    assert_eq!(task.images[0].timeout, Some(Duration::from_secs(60)));
    world.end_task(&task.id, pulled());
    world.writes.clear();
    changed.limits.timeout_seconds = Some(70);
    world.request(&Arc::new(changed), false);
    assert_eq!(world.writes, [], "what has ended is not changed");
}

#[test]
fn an_edited_job_disowns_its_old_tag() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    world.request(&Arc::new(TagRequest { key: TagKey::new("nginx", "1.26"), ..request("job") }), false);
    assert_eq!(world.spec_tag("nginx", "1.25"), None);
    assert!(world.spec_tag("nginx", "1.26").is_some());
}

#[test]
fn an_expired_tag_leaves_spec_and_status() {
    let mut world = World::new();
    world.edit(|spec| add_manual_tag(spec, "ubuntu", "latest"));
    let task = world.take_dispatched()[0].task.id.clone();
    world.end_task(&task, pulled());
    world.pass(Duration::from_secs(298));
    assert!(world.spec_tag("ubuntu", "latest").is_some());
    world.pass(Duration::from_secs(2));
    assert_eq!(world.object.as_ref().unwrap().spec, NodeImageSpec::default());
    assert_eq!(world.status(), NodeImageStatus::default());
}

#[test]
fn a_tag_goes_with_its_last_owner() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    let task = world.take_dispatched()[0].task.id.clone();
    world.end_task(&task, pulled());
    world.pass(Duration::from_secs(10_000));
    assert!(world.spec_tag("nginx", "1.25").is_some(), "beyond its 600 s: the job runs");
    live(&world, "job", Liveness::Finished);
    world.input(Input::LivenessChanged(JobUid("job".to_owned())));
    assert_eq!(world.spec_tag("nginx", "1.25"), None);

    world.request(&Arc::new(request("job")), false);
    assert_eq!(world.spec_tag("nginx", "1.25"), None, "nobody waits for it any more");
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    live(&world, "job", Liveness::Deleted);
    world.input(Input::LivenessChanged(JobUid("job".to_owned())));
    assert_eq!(world.spec_tag("nginx", "1.25"), None, "before its time");
    let said = world.take_sent();
    assert!(matches!(said.last(), Some(CloudMessage::Cancel { .. })), "{said:?}");
}

#[test]
fn manual_tags_and_foreign_owners_stay() {
    let mut world = World::new();
    let kinds = [("apps.kruise.io/v1alpha1", "CloneSet"), ("example.io/v1", "ImagePullJob")];
    let strangers = kinds.map(|(version, kind)| ObjectReference {
        api_version: Some(version.to_owned()),
        kind: Some(kind.to_owned()),
        uid: Some("t".to_owned()),
        ..ObjectReference::default()
    });
    world.edit(|spec| {
        add_manual_tag(spec, "a", "1");
        add_manual_tag(spec, "b", "1");
        spec.images.get_mut("b").unwrap().tags[0].owner_references = strangers.to_vec();
    });
    world.input(Input::LivenessChanged(JobUid("t".to_owned())));
    assert_eq!(world.spec_tag("b", "1").unwrap().owner_references, strangers);
    assert!(world.spec_tag("a", "1").is_some());
}

#[test]
fn a_manual_edit_survives_a_concurrent_write() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.edit_unseen(|spec| add_manual_tag(spec, "ubuntu", "latest"));
    world.request(&Arc::new(request("job")), false);
    assert!(world.spec_tag("ubuntu", "latest").is_some() && world.spec_tag("nginx", "1.25").is_some());
    assert_eq!(world.take_tag_states(), [("job".to_owned(), TagState::Pending)]);
}

#[test]
fn a_request_that_does_not_fit_fails() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(TagRequest { key: TagKey::new("i0", "old"), ..request("job") }), false);
    world.edit(|spec| (0..256).for_each(|n| add_manual_tag(spec, &format!("i{n}"), "1")));
    world.take_tag_states();
    world.request(&Arc::new(request("job")), false);
    let told = world.take_tag_states();
    // The tag of before is absent now.
    assert!(matches!(told.as_slice(), [(_, TagState::Failed(_)), (_, TagState::Absent)]), "{told:?}");
    let warns = |action: &Action| matches!(action, Action::Event(e) if e.note.starts_with("image nginx: "));
    assert!(world.done.iter().any(warns), "{:?}", world.done);
    assert_eq!(world.spec_tag("i0", "old"), None, "the job does not want it any more");
}

#[test]
fn only_sandbox_changes_are_written() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    world.writes.clear();
    world.request(&Arc::new(request("job")), false);
    assert_eq!(world.writes, []);
    let labels = [("team".to_owned(), "shop".to_owned())].into();
    let sandbox = Some(prepull_api::crd::kruise::SandboxConfig { labels: Some(labels), annotations: None });
    world.request(&Arc::new(TagRequest { sandbox: sandbox.clone(), ..request("job") }), false);
    assert!(matches!(world.writes[..], [NodeImageWrite::Spec { .. }]), "{:?}", world.writes);
    assert_eq!(world.object.unwrap().spec.images["nginx"].sandbox_config, sandbox);
}

/// The API server would refuse the whole write, with the requests of other namespaces in it.
#[test]
fn a_request_that_does_not_fit_fails_alone() {
    let mut world = World::new();
    let sandbox = |bytes: usize| {
        let labels = Some([("k".to_owned(), "v".repeat(bytes))].into());
        Some(prepull_api::crd::kruise::SandboxConfig { labels, annotations: None })
    };
    let with = |job: &str, image: &str, sandbox| TagRequest {
        key: TagKey::new(image, "1"),
        sandbox,
        ..request(job)
    };
    for request in [
        with("fits", "a", sandbox(1_000_000)),
        with("large", "b", sandbox(100_000)),
        with("small", "c", None),
    ] {
        live(&world, &request.owner.uid.clone().unwrap(), Liveness::Active);
        world.images.request_tag(&node(), Arc::new(request), false);
    }
    world.settle();
    let spec = &world.object.as_ref().unwrap().spec;
    assert_eq!(spec.images.keys().collect::<Vec<_>>(), ["a", "c"]);
    let states = world.take_tag_states();
    assert!(
        states.iter().any(|(job, state)| job == "large" && matches!(state, TagState::Failed(_))),
        "{states:?}"
    );
}

#[test]
fn a_large_fleets_node_images_are_smaller() {
    for (others, fits) in [(0, true), (2_000, false)] {
        let mut world = World::new();
        for number in 0..others {
            let mut object = NodeImage::new(&format!("other-{number}"), NodeImageSpec::default());
            // So that nothing is written into it.
            object.metadata.deletion_timestamp = Some(Time(world.now));
            world.images.handle(Input::NodeImage(Ok(Box::new(object.into()))), world.now);
        }
        live(&world, "job", Liveness::Active);
        let labels = Some([("k".to_owned(), "v".repeat(300 << 10))].into());
        let sandbox = Some(SandboxConfig { labels, annotations: None });
        world.request(&Arc::new(TagRequest { sandbox, ..request("job") }), false);
        assert_eq!(world.spec_tag("nginx", "1.25").is_some(), fits, "{others}");
        for number in 0..others {
            let (name, uid) = (NodeName(format!("other-{number}")), String::new());
            world.images.handle(Input::NodeImageGone { name, uid }, world.now);
        }
        world.request(&Arc::new(TagRequest { key: TagKey::new("other", "1"), ..request("job") }), false);
        assert_eq!((world.images.objects, world.images.nodes.len()), (1, 1), "{others}");
    }
}

#[test]
fn a_new_round_needs_no_room() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    live(&world, "other", Liveness::Active);
    let job = Arc::new(request("job"));
    world.request(&job, false);
    let task = world.take_dispatched()[0].task.id.clone();
    world.end_task(&task, pulled());
    world.edit(|spec| {
        add_manual_tag(spec, "large", "1");
        let labels = Some([("k".to_owned(), "v".repeat(1 << 20))].into());
        spec.images.get_mut("large").unwrap().sandbox_config =
            Some(SandboxConfig { labels, annotations: None });
    });
    world.request(&job, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 1);
    world.request(&Arc::new(TagRequest { key: TagKey::new("other", "1"), ..request("other") }), false);
    assert_eq!(world.spec_tag("other", "1"), None, "another image does");
}

/// The request of a job of another namespace than the others.
fn of_evil(job: &str, image: &str, tag: &str) -> TagRequest {
    let mut request = TagRequest { key: TagKey::new(image, tag), ..request(job) };
    request.owner.namespace = Some("evil".to_owned());
    request
}

#[test]
fn a_request_that_gives_way_at_once_is_answered() {
    let mut world = World::new();
    let last = TagRequest { key: TagKey::new("other", "1"), ..request("job") };
    // It takes a tag that has just given way.
    let mut bank = of_evil("bank", "i255", "1");
    bank.owner.namespace = Some("bank".to_owned());
    let requests = (0..256).map(|image| of_evil(&format!("evil-{image}"), &format!("i{image:03}"), "1"));
    for request in requests.chain([last, bank]) {
        live(&world, &request.owner.uid.clone().unwrap(), Liveness::Active);
        world.images.request_tag(&node(), Arc::new(request), false);
    }
    world.settle();
    let states = world.take_tag_states();
    assert_eq!(states.len(), 258, "each job hears of its tag");
    let failed = states.iter().filter(|(_, state)| matches!(state, TagState::Failed(_)));
    assert_eq!(failed.map(|(job, _)| job.as_str()).collect::<Vec<_>>(), ["evil-254", "evil-255"]);
}

#[test]
fn a_full_node_image_has_room_for_every_namespace() {
    for (images, tags) in [(256, 1), (1, 256)] {
        let mut world = World::new();
        for (image, tag) in (0..images).flat_map(|image| (0..tags).map(move |tag| (image, tag))) {
            let job = format!("evil-{image}-{tag}");
            // The first image is that of the other namespace.
            let image = if image == 0 { "nginx".to_owned() } else { format!("i{image}") };
            let request = of_evil(&job, &image, &format!("t{tag:03}"));
            live(&world, &request.owner.uid.clone().unwrap(), Liveness::Active);
            world.images.request_tag(&node(), Arc::new(request), false);
        }
        world.settle();
        live(&world, "job", Liveness::Active);
        if tags == 1 {
            let other = TagRequest { key: TagKey::new("other", "1"), ..request("job") };
            world.request(&Arc::new(other), false);
        } else {
            world.request(&Arc::new(request("job")), false);
        }
        let spec = &world.object.as_ref().unwrap().spec;
        let stored: usize = spec.images.values().map(|image| image.tags.len()).sum();
        let is_shops = |image: &prepull_api::crd::kruise::ImageSpec| {
            image.tags.iter().any(|tag| tag.owner_references[0].namespace.as_deref() == Some("shop"))
        };
        assert!(stored == 256 && spec.images.values().any(is_shops), "{images} {tags} {stored}");
    }
}

#[test]
fn a_begun_pull_keeps_its_room() {
    let mut world = World::new();
    let others = (0..255).map(|image| of_evil(&format!("evil-{image}"), &format!("i{image:03}"), "1"));
    for request in std::iter::once(of_evil("evil", "z", "1")).chain(others) {
        live(&world, &request.owner.uid.clone().unwrap(), Liveness::Active);
        world.request(&Arc::new(request), false);
    }
    assert_eq!(world.take_dispatched().len(), 1, "of the first one, and its status isn't written yet");
    live(&world, "job", Liveness::Active);
    world.request(&Arc::new(request("job")), false);
    assert_eq!(world.take_sent(), [], "nothing is cancelled");
    let is_there = |image: &str| world.object.as_ref().unwrap().spec.images.contains_key(image);
    assert_eq!(["z", "i254", "nginx"].map(is_there), [true, false, true]);
}

/// A node that has nothing to do costs nothing.
#[test]
fn news_of_others_wakes_no_node() {
    let mut world = World::new();
    let news = |job: &str| Input::LivenessChanged(JobUid(job.to_owned()));
    live(&world, "job", Liveness::Active);
    world.slots = 0;
    world.request(&Arc::new(request("job")), false);
    world.slots = 1;
    world.input(news("other"));
    assert_eq!(world.take_dispatched(), [], "the job of another node");
    world.input(Input::SlotFreed(node()));
    assert_eq!(world.take_dispatched().len(), 1);
    live(&world, "job", Liveness::Deleted);
    world.input(Input::SlotFreed(node()));
    assert!(world.spec_tag("nginx", "1.25").is_some(), "no tag waits for a slot");
    world.input(news("job"));
    assert_eq!(world.spec_tag("nginx", "1.25"), None);
}
