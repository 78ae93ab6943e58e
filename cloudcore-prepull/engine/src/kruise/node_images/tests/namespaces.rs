#![allow(clippy::unwrap_used)]
//! A tag that jobs of several namespaces share.

use super::*;

fn secret(namespace: &str) -> prepull_api::crd::kruise::SecretObject {
    prepull_api::crd::kruise::SecretObject { namespace: namespace.to_owned(), name: "s".to_owned() }
}

/// The request of a job for nginx:1.25, from another namespace and with a secret of that.
fn request_from(namespace: &str, job: &str) -> Arc<TagRequest> {
    let mut request = TagRequest { secrets: vec![secret(namespace)], ..request(job) };
    request.owner.namespace = Some(namespace.to_owned());
    request.image_pull_policy = Some("Always".to_owned());
    Arc::new(request)
}

fn secrets_of(dispatch: &TagDispatch) -> Vec<String> {
    dispatch.secrets.iter().map(ToString::to_string).collect()
}

#[test]
fn each_namespace_pulls_with_its_own_secrets() {
    let mut world = World::new();
    world.run_jobs(&["shop-job", "bank-job"]);
    world.request(&request_from("shop", "shop-job"), false);
    let first = world.take_dispatched();
    assert_eq!((first.len(), secrets_of(&first[0])), (1, vec!["shop/s".to_owned()]));
    world.request(&request_from("bank", "bank-job"), false);
    assert_eq!(world.take_dispatched(), [], "the pull that runs is the other namespace's");
    world.take_tag_states();
    world.end_task(&first[0].task.id, pulled());
    let told = world.take_tag_states();
    let of = |job: &str| told.iter().filter(|(of, _)| of == job).map(|(_, state)| *state).collect::<Vec<_>>();
    assert!(matches!(of("shop-job")[..], [TagState::Succeeded(_)]), "{told:?}");
    assert!(of("bank-job").iter().all(|state| *state == TagState::Pending), "{told:?}");

    let second = world.take_dispatched();
    assert_eq!((second.len(), secrets_of(&second[0])), (1, vec!["bank/s".to_owned()]));
    world.end_task(&second[0].task.id, failed("401"));
    let told = world.take_tag_states();
    assert!(matches!(&told[..], [(job, TagState::Failed(_))] if job == "bank-job"), "{told:?}");
    let failures = |world: &World| {
        let object = |action: &Action| match action {
            Action::Event(event) if event.kind == crate::shared::events::ObjectKind::ImagePullJob => {
                Some(event.object.name.clone())
            }
            _ => None,
        };
        world.done.iter().filter_map(object).collect::<Vec<_>>()
    };
    assert_eq!(failures(&world), ["bank-job"]);

    // A further round of the first one is its own again.
    world.request(&request_from("shop", "shop-job"), true);
    let third = world.take_dispatched();
    assert_eq!((third.len(), secrets_of(&third[0])), (1, vec!["shop/s".to_owned()]));
    world.take_tag_states();
    world.end_task(&third[0].task.id, pulled());
    let told = world.take_tag_states();
    assert!(matches!(&told[..], [(job, TagState::Succeeded(_))] if job == "shop-job"), "{told:?}");
}

#[test]
fn a_pull_counts_only_in_its_namespace() {
    let mut world = World::new();
    world.run_jobs(&["shop-job", "bank-job"]);
    world.request(&request_from("shop", "shop-job"), false);
    let first = world.take_dispatched()[0].task.id.clone();
    world.end_task(&first, failed("404"));
    world.request(&request_from("bank", "bank-job"), false);
    let second = world.take_dispatched()[0].task.id.clone();
    world.take_tag_states();
    world.jobs.borrow_mut().insert(JobUid("bank-job".to_owned()), Liveness::Deleted);
    world.input(Input::LivenessChanged(JobUid("bank-job".to_owned())));
    world.end_task(&second, pulled());
    let told = world.take_tag_states();
    assert!(!told.iter().any(|(_, state)| matches!(state, TagState::Succeeded(_))), "{told:?}");
}

#[test]
fn a_restart_repeats_requests_across_namespaces() {
    let mut world = World::new();
    for job in ["shop-job", "bank-job"] {
        world.run_jobs(&[job]);
        let namespace = job.strip_suffix("-job").unwrap();
        world.request(&request_from(namespace, job), false);
        let task = world.take_dispatched()[0].task.id.clone();
        world.end_task(&task, pulled());
    }
    let mut restarted = world.restarted();
    restarted.jobs = world.jobs.clone();
    restarted.settle();
    restarted.connect(&[]);
    let told = restarted.take_tag_states();
    assert!(matches!(&told[..], [(job, TagState::Succeeded(_))] if job == "bank-job"), "{told:?}");
    restarted.request(&request_from("shop", "shop-job"), false);
    let again = restarted.take_dispatched();
    assert_eq!((again.len(), secrets_of(&again[0])), (1, vec!["shop/s".to_owned()]));
    restarted.end_task(&again[0].task.id, pulled());
    let told = restarted.take_tag_states();
    let last = told.last().unwrap();
    assert!(last.0 == "shop-job" && matches!(last.1, TagState::Succeeded(_)), "{told:?}");
}

#[test]
fn a_waiting_request_still_gives_up_the_old_tag() {
    let mut world = World::new();
    world.run_jobs(&["shop-job", "bank-job"]);
    let (request, key) = (request_from("bank", "bank-job"), TagKey::new("nginx", "old"));
    world.request(&Arc::new(TagRequest { key, ..(*request).clone() }), false);
    world.request(&request_from("shop", "shop-job"), false);
    world.request(&request, false);
    assert_eq!(world.spec_tag("nginx", "old"), None);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().owner_references.len(), 1, "it waits");
}

#[test]
fn a_tag_that_is_added_again_is_another() {
    let mut world = World::new();
    world.run_jobs(&["shop-job", "bank-job"]);
    world.request(&request_from("shop", "shop-job"), false);
    let first = world.take_dispatched()[0].task.id.clone();
    // One write takes the tag out for one job, and puts it in for the other.
    world.api = false;
    world.jobs.borrow_mut().insert(JobUid("shop-job".to_owned()), Liveness::Deleted);
    world.input(Input::LivenessChanged(JobUid("shop-job".to_owned())));
    world.request(&request_from("bank", "bank-job"), false);
    world.api = true;
    world.pass(Duration::from_secs(10));
    world.end_task(&first, pulled());
    assert_eq!(
        world.tag("nginx", "1.25").map(|tag| tag.phase),
        Some(prepull_api::crd::kruise::PullPhase::Pulling)
    );
    let second = world.take_dispatched();
    assert_eq!((second.len(), secrets_of(&second[0])), (1, vec!["bank/s".to_owned()]));
}

/// The request of a job of shop for a tag of nginx, with a secret that has the job's name.
fn request_with_secret(job: &str, tag: &str) -> Arc<TagRequest> {
    let secret = prepull_api::crd::kruise::SecretObject { name: job.to_owned(), ..secret("shop") };
    Arc::new(TagRequest { key: TagKey::new("nginx", tag), secrets: vec![secret], ..request(job) })
}

fn delete_job(world: &mut World, job: &str) {
    world.jobs.borrow_mut().insert(JobUid(job.to_owned()), Liveness::Deleted);
    world.input(Input::LivenessChanged(JobUid(job.to_owned())));
}

/// The names of the secrets that nginx has in the NodeImage.
fn stored_secrets(world: &World) -> Vec<String> {
    let image = &world.object.as_ref().unwrap().spec.images["nginx"];
    image.pull_secrets.iter().map(|secret| format!("{}/{}", secret.namespace, secret.name)).collect()
}

#[test]
fn a_deleted_job_takes_its_secrets_along() {
    let mut world = World::new();
    world.run_jobs(&["one", "two", "bank-job"]);
    for (job, tag) in [("one", "1"), ("two", "2")] {
        world.request(&request_with_secret(job, tag), false);
    }
    world.request(&request_from("bank", "bank-job"), false);
    assert_eq!(stored_secrets(&world), ["shop/one", "shop/two", "bank/s"]);
    delete_job(&mut world, "two");
    assert_eq!(stored_secrets(&world), ["shop/one", "bank/s"]);
    // Also one that leaves the image, since its own has changed.
    let moved = TagRequest { key: TagKey::new("other", "1"), ..(*request_from("bank", "bank-job")).clone() };
    world.request(&Arc::new(moved), false);
    assert_eq!(stored_secrets(&world), ["shop/one"]);
}

#[test]
fn a_persons_secrets_outlive_those_of_jobs() {
    let mut world = World::new();
    world.edit(|spec| {
        add_manual_tag(spec, "nginx", "manual");
        spec.images.get_mut("nginx").unwrap().pull_secrets = vec![secret("shop"), secret("bank")];
    });
    for job in (0..20).map(|number| format!("job-{number}")) {
        world.run_jobs(&[&job]);
        world.request(&request_with_secret(&job, "1"), false);
        delete_job(&mut world, &job);
    }
    let kept = stored_secrets(&world);
    assert_eq!((kept.len(), &kept[..2]), (17, &["shop/s".to_owned(), "bank/s".to_owned()][..]));
}

#[test]
fn few_secrets_are_read_for_a_task() {
    let mut world = World::new();
    for job in (0..40).map(|number| format!("job-{number}")) {
        world.run_jobs(&[&job]);
        world.request(&request_with_secret(&job, "1"), false);
    }
    let first = world.take_dispatched().remove(0);
    assert_eq!((secrets_of(&first), first.of_jobs.len()), (vec!["shop/job-0".to_owned()], 1));
    world.end_task(&first.task.id, pulled());
    let second = world.take_dispatched().remove(0);
    assert_eq!((second.secrets.len(), second.of_jobs.len()), (32, 32));
    assert_eq!(secrets_of(&second)[..2], ["shop/job-39", "shop/job-38"], "that of the last one comes first");
}

#[test]
fn a_job_is_sent_with_its_own_sandbox() {
    let mut world = World::new();
    world.slots = 0;
    world.run_jobs(&["shop-job", "evil-job"]);
    world.request(&request_from("shop", "shop-job"), false);
    let labels = Some([("app".to_owned(), "evil".to_owned())].into());
    let sandbox = Some(prepull_api::crd::kruise::SandboxConfig { labels, annotations: None });
    let key = TagKey::new("nginx", "evil");
    let evil = TagRequest { key, sandbox, ..(*request_from("evil", "evil-job")).clone() };
    world.request(&Arc::new(evil), false);
    world.slots = 2;
    world.input(Input::SlotFreed(node()));
    let sent = world.take_dispatched().into_iter();
    let sandboxes: BTreeMap<_, _> =
        sent.map(|sent| (sent.task.images[0].image.clone(), sent.task.images[0].sandbox.is_some())).collect();
    assert_eq!(sandboxes, [("nginx:1.25".to_owned(), false), ("nginx:evil".to_owned(), true)].into());
}
