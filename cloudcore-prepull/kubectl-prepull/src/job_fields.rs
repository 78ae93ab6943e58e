//! The fields of a job that may change while it runs.

/// A field of a job that may change while it runs.
pub(crate) struct JobField {
    pub(crate) key: &'static str,
    /// Where it is in the job.
    pub(crate) path: &'static str,
    pub(crate) kind: ValueKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueKind {
    Text,
    /// A time, in seconds.
    Seconds,
    Number,
    Truth,
    /// Texts with commas in between.
    Texts,
    Secret,
    Nodes,
    Windows,
    Deltas,
}

const fn field(key: &'static str, path: &'static str, kind: ValueKind) -> JobField {
    JobField { key, path, kind }
}

/// The settings by the names that `set` has for them.
pub(crate) static FIELDS: [JobField; 15] = [
    field("rate", "spec.download.maxRate", ValueKind::Text),
    field("site-rate", "spec.download.maxSiteRate", ValueKind::Text),
    field("share", "spec.download.shareWithinSite", ValueKind::Truth),
    field("deltas", "spec.download.deltas", ValueKind::Deltas),
    field("concurrency", "spec.imagePrePullTemplate.concurrency", ValueKind::Nodes),
    field("secret", "spec.imagePrePullTemplate.imageSecrets", ValueKind::Secret),
    field("window", "spec.windows", ValueKind::Windows),
    field("wave", "spec.rollout.steps", ValueKind::Texts),
    field("pause", "spec.rollout.pauseSeconds", ValueKind::Seconds),
    field("tolerate", "spec.imagePrePullTemplate.failureTolerate", ValueKind::Text),
    field("retries", "spec.imagePrePullTemplate.retryTimes", ValueKind::Number),
    field("node-timeout", "spec.imagePrePullTemplate.timeoutSeconds", ValueKind::Seconds),
    field("deadline", "spec.activeDeadlineSeconds", ValueKind::Seconds),
    field("ttl", "spec.ttlSecondsAfterFinished", ValueKind::Seconds),
    field("follow-nodes", "spec.followNodes", ValueKind::Truth),
];

/// What can be set.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().map(|field| field.key)
}

/// Whether `set` changes the field at this path.
pub(crate) fn is_setting(path: &str) -> bool {
    FIELDS.iter().any(|field| field.path == path)
}
