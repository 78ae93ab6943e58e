//! The edits of a spec: to other values, and to values that make no sense.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use prepull_api::crd::download::{DownloadSpec, WindowSpec};
use prepull_api::crd::job::{
    ImagePrePullJobSpec, ImagePrePullOverrider, ImageSource, OverrideRule, OverriderEntry, Overriders,
    RegistrySecret, RolloutStrategy,
};

use crate::check::specs::is_valid;
use crate::removal;
use crate::rng::Rng;

/// Edits a field that a running job follows.
fn edit(spec: &mut ImagePrePullJobSpec, edges: usize, rng: &mut Rng) {
    let yes = rng.chance(50);
    let what = rng.below(15);
    // Without a draw of its own, so that the seeds that found something still mean what they did.
    if matches!(what, 2 | 3 | 11) {
        spec.recheck = spec.recheck.clamp(0, 100) + 1;
    }
    let template = &mut spec.image_pre_pull_template;
    match what {
        0 | 1 => {
            template.concurrency = i64::try_from(rng.below(edges + 1)).unwrap();
            // This too, and what makes it true: so it is taken back, which is refused.
            spec.cancel &= yes;
        }
        2 => template.timeout_seconds = rng.pick(&[0, 5, 20, 60, 600]),
        3 => {
            rng.pick(&["0", "0.3", "1"]).clone_into(&mut template.failure_tolerate);
            spec.pin = yes;
        }
        4 => spec.suspend = yes,
        5 => (spec.suspend, spec.pause) = (yes, yes),
        6 => spec.active_deadline_seconds = yes.then(|| rng.pick(&[10, 60, 200])),
        7 => {
            spec.follow_nodes = yes;
            // These without draws of their own, so that the seeds that found something still mean what they did.
            spec.windows = windows(template.images.len() + usize::from(yes));
        }
        8..11 => spec.retry = spec.retry.clamp(0, 100) + rng.pick(&[1, 1, 2]),
        11 => {
            spec.retry = 0;
            spec.windows = windows(edges);
            spec.cancel |= yes;
        }
        12 => {
            spec.ttl_seconds_after_finished = yes.then(|| rng.pick(&[0, 30]));
            spec.download = yes.then(|| DownloadSpec {
                max_rate: Some("2Mi".to_owned()),
                share_within_site: Some(true),
                ..DownloadSpec::default()
            });
        }
        _ => match &mut spec.rollout {
            Some(rollout) if rng.chance(70) => rollout.pause_seconds = rng.pick(&[0, 5, 40]),
            rollout => *rollout = yes.then(|| self::rollout(rng)),
        },
    }
}

/// Edits a field, or asks a job that is over for a re-check.
pub(super) fn edit_or_recheck(
    spec: &mut ImagePrePullJobSpec,
    edges: usize,
    rng: &mut Rng,
    is_rechecked: bool,
) {
    let mut edited = spec.clone();
    edit(&mut edited, edges, rng);
    if is_rechecked {
        spec.recheck = spec.recheck.clamp(0, 100) + 1;
    } else {
        *spec = edited;
    }
}

/// The windows of one kind of job: none for most; short ones, and then a long one; or the whole day but
/// for some minutes around the beginning of a run, which is at 01:46:40 UTC.
pub(super) fn windows(kind: usize) -> Vec<WindowSpec> {
    let window = |start: String, duration: &str, zone: &str| WindowSpec {
        days: Vec::new(),
        start,
        duration: duration.to_owned(),
        time_zone: zone.to_owned(),
    };
    match kind % 6 {
        1 => {
            let short = (47..53).step_by(2).map(|minute| window(format!("01:{minute}"), "40s", "UTC"));
            short.chain([window("01:55".to_owned(), "23h", "Node")]).collect()
        }
        // 01:50 UTC.
        2 => vec![window("03:50".to_owned(), "23h55m", "Europe/Berlin")],
        _ => Vec::new(),
    }
}

/// Edits a field that a running job does not follow, to a valid value.
pub(super) fn edit_fixed_part(spec: &mut ImagePrePullJobSpec, edges: usize, rng: &mut Rng) {
    if spec.image_pre_pull_template.remove.is_some() {
        return removal::edit_fixed_part(spec, rng);
    }
    let template = &mut spec.image_pre_pull_template;
    match rng.below(11) {
        0 => template.images = vec!["r.example/other:v1".to_owned()],
        1 => template.images.push("r.example/more:v1".to_owned()),
        2..6 if template.label_selector.is_none() => {
            let new = (0..edges).map(|node| format!("n{node}"));
            template.node_names = new.collect();
        }
        2..6 => {
            template.label_selector = None;
            template.node_names = vec!["n0".to_owned()];
        }
        6 => template.image_pull_policy = Some("Never".to_owned()),
        7 => template.check_items = vec!["mem".to_owned()],
        8 => template.retry_times += 1,
        9 => template.image_secrets = Some("shop/other".to_owned()),
        _ => spec.image_pre_pull_overriders = vec![overrider(), overrider()],
    }
}

/// Edits a field to a value that makes no sense.
pub(super) fn make_invalid(spec: &mut ImagePrePullJobSpec, rng: &mut Rng) {
    let template = &mut spec.image_pre_pull_template;
    let bad = || "no such thing".to_owned();
    match rng.below(20) {
        0 => template.concurrency = -1,
        1 => template.timeout_seconds = -1,
        2 => template.timeout_seconds = i64::MAX,
        3 => rng.pick(&["20%", "-1", "1.5", "many"]).clone_into(&mut template.failure_tolerate),
        4 => spec.active_deadline_seconds = Some(rng.pick(&[0, -5])),
        5 => spec.ttl_seconds_after_finished = Some(-1),
        6 => spec.retry = rng.pick(&[-1, i64::MAX]),
        7 => spec.rollout = Some(RolloutStrategy { steps: vec!["0%".to_owned()], pause_seconds: 0 }),
        8 => {
            let steps = vec!["50%".to_owned(), "10%".to_owned()];
            spec.rollout = Some(RolloutStrategy { steps, pause_seconds: 0 });
        }
        9 => spec.rollout = Some(RolloutStrategy { steps: Vec::new(), pause_seconds: -1 }),
        10 => template.images = vec![String::new()],
        11 => (template.images, template.remove) = (Vec::new(), None),
        12 => template.image_sources = vec![ImageSource::default()],
        13 => template.image_pull_policy = Some(bad()),
        14 => template.check_items = vec![bad()],
        15 => template.retry_times = -1,
        16 => template.image_secrets = Some(bad()),
        17 => template.registry_secrets = vec![RegistrySecret { registry: bad(), image_secret: bad() }],
        18 => {
            template.node_names = vec!["n0".to_owned()];
            template.label_selector = Some(LabelSelector::default());
        }
        _ => {
            let mut wrong = overrider();
            wrong.image_pre_pull_overrider.overriders.image_overriders[0].component = bad();
            spec.image_pre_pull_overriders = vec![wrong];
        }
    }
    assert!(!is_valid(spec), "this is to be invalid: {spec:?}");
}

/// Waves.
pub(super) fn rollout(rng: &mut Rng) -> RolloutStrategy {
    let steps = ["1", "50%", "100%"];
    let from = rng.below(3);
    RolloutStrategy {
        steps: steps[from..].iter().map(|step| (*step).to_owned()).collect(),
        pause_seconds: rng.pick(&[0, 5, 40]),
    }
}

/// Another tag for the nodes of a region.
pub(super) fn overrider() -> OverriderEntry {
    let rule = OverrideRule {
        component: "Tag".to_owned(),
        operator: "replace".to_owned(),
        value: Some("v2".to_owned()),
    };
    let overriders = Overriders { image_overriders: vec![rule], ..Overriders::default() };
    let image_pre_pull_overrider = ImagePrePullOverrider { node_label: "region=x".to_owned(), overriders };
    OverriderEntry { image_pre_pull_overrider }
}
