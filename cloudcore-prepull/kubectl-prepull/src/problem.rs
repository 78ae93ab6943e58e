//! Texts of errors: the failure, the object, and the remedy.

mod answer;

use std::error::Error as StdError;
use std::io::Write;
use std::time::Duration;

use kube::core::Status;
use kube::runtime::watcher;
use prepull_program::errors::with_causes;

use crate::screen::{sanitize_line, sanitize_output};

/// Which cluster it is, for errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClusterPlace {
    /// Address of the API server.
    pub(crate) server: String,
    /// Context of the kubeconfig; none in a pod.
    pub(crate) context: Option<String>,
    /// How long an answer may take.
    pub(crate) patience: Duration,
}

/// A combination of arguments that makes no sense. It ends the program with the exit status of clap's own errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct WrongUsage(pub(crate) String);

/// Prints an error on standard error.
pub(crate) fn print_error(error: &anyhow::Error) {
    print_note(&format!("error: {}", error_text(error)));
}

/// Prints a line on standard error.
pub(crate) fn print_note(text: &str) {
    // A closed stderr is no reason to panic.
    let _ = writeln!(std::io::stderr(), "{}", sanitize_output(text));
}

/// An error and its causes, in one line. Of the cluster's it has the server's own words once.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let Some(inner) = error.chain().find_map(kube_error) else {
        return sanitize_line(&with_causes(error.as_ref()));
    };
    // A watch repeats what it wraps.
    let outer =
        error.chain().take_while(|cause| kube_error(*cause).is_none() && !cause.is::<watcher::Error>());
    let texts = outer.map(ToString::to_string).chain([of_cluster(inner)]);
    sanitize_line(&texts.collect::<Vec<_>>().join(": "))
}

/// An error of the client in words.
fn of_cluster(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(answer) => answer::sentence(answer),
        kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => answer::NO_ANSWER.to_owned(),
        _ if is_silence(error) => "the API server has not answered in time (--request-timeout)".to_owned(),
        _ => {
            let causes = with_causes(error);
            // The libraries name themselves in front of what they say.
            let causes = causes.trim_start_matches("ServiceError: ").trim_start_matches("HyperError: ");
            causes.trim_start_matches("client error (Connect): ").to_owned()
        }
    }
}

/// Whether the server was silent for longer than we wait.
fn is_silence(error: &kube::Error) -> bool {
    let causes = std::iter::successors(Some(error as &(dyn StdError + 'static)), |&cause| cause.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    causes.any(|cause| cause.kind() == std::io::ErrorKind::TimedOut)
}

/// Whether a proxy has refused the connection. The type of that error isn't public, so we know it by its words.
fn is_of_proxy(error: &kube::Error) -> bool {
    with_causes(error).contains("tunnel error: ")
}

/// Whether trying again does not help: the credentials are refused, a right or the definitions are missing. Once `is_heard`,
/// it helps: an API server that has just begun refuses for a moment what it has granted before.
pub(crate) fn is_lasting(error: &anyhow::Error, is_heard: bool) -> bool {
    !is_heard && server_answer(error).is_some_and(|answer| matches!(answer.code, 401 | 403 | 404))
}

/// Whether the reader of our output has closed the pipe.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let is_pipe = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(is_pipe))
}

/// Ignores the error of a closed pipe.
pub(crate) fn unless_unread(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    match printed {
        Err(error) if is_closed_pipe(&error) => Ok(()),
        printed => printed,
    }
}

/// Whether an answer is a web page, of something that stands in front of the API server.
pub(crate) fn is_page(answer: &Status) -> bool {
    answer::is_page(&answer.message)
}

/// The answer of the API server in an error, if it is one.
pub(crate) fn server_answer(error: &anyhow::Error) -> Option<&Status> {
    error.chain().find_map(|cause| match kube_error(cause)? {
        kube::Error::Api(status) => Some(status.as_ref()),
        _ => None,
    })
}

fn kube_error<'a>(cause: &'a (dyn StdError + 'static)) -> Option<&'a kube::Error> {
    cause
        .downcast_ref::<kube::Error>()
        .or_else(|| cause.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref))
}

/// The error with what it means and its remedy, if it is one of the cluster that has one.
pub(crate) fn explain(error: anyhow::Error, place: &ClusterPlace) -> anyhow::Error {
    if let Some(text) = server_answer(&error).and_then(|answer| explain_answer(answer, place)) {
        return anyhow::anyhow!(text);
    }
    let Some(inner) = error.chain().find_map(kube_error) else { return error };
    let text = match inner {
        _ if is_silence(inner) => {
            return anyhow::anyhow!(
                "the API server {} has not answered for {} (--request-timeout): a firewall is in between, or it has too much \
                 to do",
                describe_place(place),
                humantime::format_duration(place.patience)
            );
        }
        kube::Error::Auth(_) => format!(
            "the kubeconfig{} has no usable credentials: log in again",
            place.context.as_deref().map(|name| format!(", context {name},")).unwrap_or_default()
        ),
        kube::Error::Service(_) if is_of_proxy(inner) => format!(
            "the proxy on the way to the API server {} refuses: let it CONNECT there, give it a user and a password as in \
             HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT, or add the server to NO_PROXY",
            describe_place(place)
        ),
        kube::Error::Service(_) | kube::Error::HyperError(_) | kube::Error::ReadEvents(_) => {
            let other = if place.context.is_some() { "; --context and --kubeconfig name another cluster" } else { "" };
            format!("the API server {} cannot be reached{other}", describe_place(place))
        }
        kube::Error::ProxyProtocolDisabled { .. } | kube::Error::ProxyProtocolUnsupported { .. } => {
            "a proxy is http://, https:// or socks5://HOST:PORT, in HTTPS_PROXY or as `proxy-url` of the cluster in the \
             kubeconfig"
                .to_owned()
        }
        _ => return error,
    };
    anyhow::anyhow!("{text}: {}", of_cluster(inner))
}

fn describe_place(place: &ClusterPlace) -> String {
    match &place.context {
        Some(context) => format!("{} (context {context})", place.server),
        None => place.server.clone(),
    }
}

/// What an answer means, if the remedy is not with the object that was asked for.
fn explain_answer(answer: &Status, place: &ClusterPlace) -> Option<String> {
    if answer::is_page(&answer.message) {
        return None;
    }
    if answer.code == 401 {
        return Some(format!(
            "the API server {} does not accept the credentials of the kubeconfig: they are wrong or have expired; log in \
             again",
            describe_place(place)
        ));
    }
    if is_unserved(answer) {
        return Some(format!(
            "the API server {} does not know ImagePrePullJobs: their definitions are not installed (kubectl apply -f \
             manifests/crds), or it is not the cluster that you mean",
            describe_place(place)
        ));
    }
    let right = MissingRight::from_answer(answer)?;
    Some(format!(
        "{right}. An administrator of the cluster can grant it: manifests/kubectl-prepull/rbac.yaml has roles with all that \
         this command needs"
    ))
}

/// Whether a 404 means that the kind is not served. If only the object is missing, the answer names it.
pub(crate) fn is_unserved(answer: &Status) -> bool {
    answer.code == 404 && answer.details.as_ref().is_none_or(|details| details.name.is_empty())
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("user {user} lacks a right: to {verb} {resource} {scope}")]
pub(crate) struct MissingRight {
    user: String,
    verb: String,
    resource: String,
    scope: String,
}

impl MissingRight {
    /// Reads it out of the RBAC part of a 403: `User "…" cannot list resource "…" in API group "…" at the cluster scope`.
    /// Admission also answers 403, about one object and for reasons of its own.
    pub(crate) fn from_answer(answer: &Status) -> Option<Self> {
        if answer.code != 403 {
            return None;
        }
        let (_, rest) = answer.message.split_once("User \"")?;
        let (user, rest) = rest.split_once("\" cannot ")?;
        let (verb, rest) = rest.split_once(" resource \"")?;
        let (resource, rest) = rest.split_once("\" in API group \"")?;
        let (group, rest) = rest.split_once('"')?;
        let resource = if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") };
        let scope = match rest.split_once("in the namespace \"").and_then(|(_, name)| name.split_once('"')) {
            Some((namespace, _)) => format!("in namespace {namespace}"),
            None => "in the whole cluster".to_owned(),
        };
        Some(Self { user: user.to_owned(), verb: verb.to_owned(), resource, scope })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn place() -> ClusterPlace {
        let context = Some("prod".to_owned());
        ClusterPlace { server: "https://api:6443/".to_owned(), context, patience: Duration::from_secs(10) }
    }

    fn explained(status: serde_json::Value) -> String {
        let status: Status = serde_json::from_value(status).unwrap();
        let error = anyhow::Error::from(kube::Error::Api(status.boxed())).context("read job web");
        error_text(&explain(error, &place()))
    }

    #[test]
    fn only_a_first_refusal_is_lasting() {
        for (code, lasts) in [(401, true), (403, true), (404, true), (410, false), (503, false)] {
            let status: Status = serde_json::from_value(json!({ "code": code })).unwrap();
            let error = anyhow::Error::from(kube::Error::Api(status.boxed())).context("read job web");
            assert_eq!(is_lasting(&error, false), lasts, "{code}");
            assert!(!is_lasting(&error, true), "{code}");
        }
    }

    #[test]
    fn missing_rights_name_verb_resource_scope() {
        let said = explained(json!({ "code": 403, "message":
            "imageprepulljobs.operations.kubeedge.io \"web\" is forbidden: User \"jane\" cannot patch resource \
             \"imageprepulljobs\" in API group \"operations.kubeedge.io\" at the cluster scope" }));
        let words = "user jane lacks a right: to patch imageprepulljobs.operations.kubeedge.io in the whole cluster. ";
        assert!(said.starts_with(words) && said.contains("manifests/kubectl-prepull/rbac.yaml"), "{said}");
        let said = explained(json!({ "code": 403, "message":
            "deployments.apps \"web\" is forbidden: User \"jane\" cannot get resource \"deployments\" in API group \"apps\" \
             in the namespace \"shop\"" }));
        assert!(
            said.starts_with("user jane lacks a right: to get deployments.apps in namespace shop. "),
            "{said}"
        );
        let said = explained(
            json!({ "code": 403, "message": "admission webhook \"w\" denied the request: on Sunday" }),
        );
        assert!(said.starts_with("read job web: ") && said.contains("on Sunday"), "{said}");
    }

    #[test]
    fn distinguishes_missing_definitions_from_missing_objects() {
        let said = explained(json!({ "code": 404, "message": "404 page not found", "reason": "NotFound" }));
        assert!(said.contains("https://api:6443/ (context prod)"), "{said}");
        assert!(said.contains("kubectl apply -f manifests/crds"), "{said}");
        let said =
            explained(json!({ "code": 404, "message": "\"web\" not found", "details": { "name": "web" } }));
        assert!(said.starts_with("read job web: "), "{said}");
    }

    #[test]
    fn refused_credentials_ask_for_a_login() {
        let said = explained(json!({ "code": 401, "message": "Unauthorized" }));
        assert!(said.contains("context prod") && said.ends_with("have expired; log in again"), "{said}");
    }
}
