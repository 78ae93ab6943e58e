//! The health checks for Argo CD and Flux in `manifests/gitops`, evaluated over the statuses that the engine writes.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use mlua::{Lua, LuaSerdeExt};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};
use prepull_engine::prepull::aggregate::{OtherSpec, Situation, conditions};
use serde::Deserialize;
use serde_json::{Value, json};

const RUNNING: Situation<'static> = Situation {
    phase: JobPhase::InProgress,
    started: true,
    suspended: false,
    paused: false,
    ended_as: None,
    refusal: None,
    other: None,
    warning: None,
    reason: "",
};
const ENDED: Situation<'static> = Situation { phase: JobPhase::Completed, ..RUNNING };
const REFUSED: Situation<'static> =
    Situation { phase: JobPhase::Failure, started: false, refusal: Some("no such field"), ..RUNNING };
const CHANGED: Situation<'static> =
    Situation { refusal: Some("changed"), other: Some(OtherSpec::Refused), ..RUNNING };

/// A job in this situation, with a status of the generation 2.
fn job(situation: &Situation<'_>, generation: i64) -> Value {
    let conditions: Vec<Condition> = conditions(situation, &[], Some(2), Timestamp::UNIX_EPOCH);
    let status = ImagePrePullJobStatus {
        observed_generation: Some(2),
        phase: situation.phase,
        conditions,
        ..ImagePrePullJobStatus::default()
    };
    json!({"metadata": {"name": "job", "generation": generation}, "spec": {}, "status": status})
}

/// Each job, what Argo CD is to say of it, and what Flux.
fn cases() -> Vec<(&'static str, Value, &'static str, &'static str)> {
    let failed = Situation { phase: JobPhase::Failure, ..RUNNING };
    let unseen = json!({"metadata": {"name": "job", "generation": 1}, "spec": {}, "status": {}});
    vec![
        ("not seen", unseen, "Progressing", "InProgress"),
        ("pulls", job(&RUNNING, 2), "Progressing", "InProgress"),
        (
            "waits",
            job(&Situation { phase: JobPhase::Init, started: false, ..RUNNING }, 2),
            "Progressing",
            "InProgress",
        ),
        ("suspended", job(&Situation { suspended: true, ..RUNNING }, 2), "Suspended", "InProgress"),
        ("ended well", job(&ENDED, 2), "Healthy", "Current"),
        ("ended well, for the images before", job(&ENDED, 3), "Progressing", "InProgress"),
        ("failed", job(&failed, 2), "Degraded", "Failed"),
        ("refused", job(&REFUSED, 2), "Degraded", "Failed"),
        ("runs, and other images wait", job(&CHANGED, 2), "Progressing", "InProgress"),
        (
            "has ended, and other images are next",
            job(&Situation { phase: JobPhase::Completed, other: Some(OtherSpec::Next), ..CHANGED }, 2),
            "Progressing",
            "InProgress",
        ),
        (
            "has ended, and the spec makes no sense",
            job(&Situation { phase: JobPhase::Completed, ..CHANGED }, 2),
            "Degraded",
            "Failed",
        ),
    ]
}

fn documents(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/gitops").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_multiple(&text).unwrap()
}

#[test]
fn argo_cd_waits_for_the_specs_end() {
    let data = &documents("argocd-health.yaml")[0]["data"];
    let script =
        data["resource.customizations.health.operations.kubeedge.io_ImagePrePullJob"].as_str().unwrap();
    for (case, job, expected, _) in cases() {
        let lua = Lua::new();
        lua.globals().set("obj", lua.to_value(&job).unwrap()).unwrap();
        let health: Value = lua.from_value(lua.load(script).eval().unwrap()).unwrap();
        assert_eq!(health["status"], expected, "{case}: {health}");
        assert!(health["message"].is_string(), "{case}: {health}");
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HealthCheck {
    in_progress: String,
    failed: String,
    current: String,
}

#[test]
fn flux_waits_for_the_specs_end() {
    let documents = documents("flux-kustomization.yaml");
    let check = documents.iter().find_map(|document| document["spec"]["healthCheckExprs"].get(0)).unwrap();
    let check: HealthCheck = serde_json::from_value(check.clone()).unwrap();
    let in_order = [("InProgress", check.in_progress), ("Failed", check.failed), ("Current", check.current)];
    for (case, job, _, expected) in cases() {
        let mut context = cel::Context::default();
        for (field, value) in job.as_object().unwrap() {
            context.add_variable(field.as_str(), value).unwrap();
        }
        let is_so = |expression: &str| {
            let program = cel::Program::compile(expression).unwrap();
            program.execute(&context) == Ok(cel::Value::Bool(true))
        };
        let state = in_order.iter().find(|(_, expression)| is_so(expression)).map(|(state, _)| *state);
        assert_eq!(state, Some(expected), "{case}");
    }
}
