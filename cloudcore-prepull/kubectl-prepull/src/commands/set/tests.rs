#![allow(clippy::unwrap_used)]
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::crd::status::{ImagePrePullJobStatus, Summary};

use super::*;

fn settings(line: &str) -> Vec<Setting> {
    line.split(' ').map(|setting| setting.parse().unwrap()).collect()
}

fn job(phase: JobPhase) -> ImagePrePullJob {
    let spec = json!({"imagePrePullTemplate": {"images": ["a:1"], "nodeNames": ["e"]}, "windows": [
        {"start": "22:00", "duration": "6h", "timeZone": "Node"}]});
    let mut job = ImagePrePullJob::new("web", serde_json::from_value(spec).unwrap());
    job.status = Some(ImagePrePullJobStatus {
        phase,
        start_time: Some(Time(jiff::Timestamp::UNIX_EPOCH)),
        summary: Summary { desired: 2_000, ..Summary::default() },
        ..ImagePrePullJobStatus::default()
    });
    job
}

#[test]
fn all_settings_are_one_merge_patch() {
    let line = "rate=2Mi concurrency=10% secret=harbor window=Sat,22:00+6h window=01:00-04:00@UTC wave=5%,25% \
                pause=10m deadline= share=true deltas=require";
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let window = |days: Value, start, duration, zone| {
        let mut window = json!({"start": start, "duration": duration, "timeZone": zone});
        if days != json!([]) {
            window["days"] = days;
        }
        window
    };
    assert_eq!(
        patch(&settings(&line), "shop", 2_000).unwrap(),
        json!({"spec": {
            "download": {"maxRate": "2Mi", "shareWithinSite": true, "deltas": "Require"},
            "imagePrePullTemplate": {"concurrency": 200, "imageSecrets": "shop/harbor"},
            "windows": [window(json!(["Sat"]), "22:00", "6h", "Node"), window(json!([]), "01:00", "180m", "UTC")],
            "rollout": {"steps": ["5%", "25%"], "pauseSeconds": 600},
            "activeDeadlineSeconds": null,
        }})
    );
}

#[test]
fn senseless_settings_are_refused() {
    for (line, words) in [
        ("concurrency=10%", "has not begun"),
        ("retries=many", "a number"),
        ("share=yes", "true or false"),
        ("deltas=always", "auto, never or require"),
        ("window=22-4", "START-END"),
        ("rate=1Mi rate=2Mi", "set twice"),
    ] {
        let error = patch(&settings(line), "shop", 0).unwrap_err();
        assert!(error.is::<WrongUsage>() && error.to_string().contains(words), "{line}: {error}");
    }
    assert!("color=red".parse::<Setting>().unwrap_err().contains("no setting color: rate, site-rate"));
    assert!("rate".parse::<Setting>().unwrap_err().contains("rate=2Mi"));
    let fast =
        merged(&job(JobPhase::InProgress), &patch(&settings("rate=fast"), "shop", 0).unwrap()).unwrap();
    assert!(check_job(&fast).unwrap_err().to_string().starts_with("spec.download.maxRate: "));
}

#[test]
fn what_has_changed_and_what_it_does_is_said() {
    let (settings, before) = (settings("rate=2Mi window= secret=a/b ttl=1h"), job(JobPhase::InProgress));
    let after = merged(&before, &patch(&settings, "shop", 0).unwrap()).unwrap();
    assert_eq!(
        changes(&settings, &json!(before), &json!(after)).join("; "),
        "rate from unset to 2Mi; secret from unset to a/b; window from \
         [{\"duration\":\"6h\",\"start\":\"22:00\",\"timeZone\":\"Node\"}] to unset; ttl from unset to 3600"
    );
    let said = |job: &ImagePrePullJob| effects(&settings, job).join("; ");
    assert!(said(&before).starts_with("nodes that start from now on use the secret"), "{}", said(&before));
    assert!(said(&before).ends_with("job web runs: everything else holds at once"), "{}", said(&before));
    let ended = job(JobPhase::Completed);
    assert!(said(&ended).contains("counts from its end; job web has ended: this is for its next round"));
    assert!(said(&job(JobPhase::Init)).contains("has not begun, and begins with this"));
    let mut refused = job(JobPhase::Failure);
    refused.status.get_or_insert_default().start_time = None;
    assert!(said(&refused).ends_with("was refused, and is looked at again now"));
}
