//! The consent of a Secret's owner: who may use the Secret, and which hosts may get what its wildcard entries hold.

use std::collections::BTreeMap;
use std::fmt;

use super::pattern::{RegistryPattern, glob_matches};
use crate::abbreviate::abbreviate;
use crate::image::NormalizedReference;

/// The annotation of a Secret that names who may use it.
///
/// A list, separated by commas or white space. An entry is the name of an ImagePrePullJob, or `nodeimage/` and the name
/// of a NodeImage; in both `*` stands for any text. `*` alone stands for everybody.
pub const ALLOW: &str = "prepull.kubeedge.io/allow";
/// The annotation of a Secret that names the hosts for which its wildcard entries may be used: a list of patterns like
/// the keys of the entries. An entry without `*` in its host needs none, since it names its host itself.
pub const ALLOW_HOSTS: &str = "prepull.kubeedge.io/allow-hosts";

/// The prefix of a NodeImage's name.
const NODE_IMAGE: &str = "nodeimage/";

/// A user of a Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretUser<'a> {
    /// The ImagePrePullJob of this name.
    Job(&'a str),
    /// The NodeImage of this name, by hand and not for a job.
    NodeImage(&'a str),
}

/// The consent of a Secret's owner. Without annotations it allows nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consent {
    /// The annotation [`ALLOW`] as it is written, trimmed.
    text: String,
    users: Result<Vec<UserPattern>, ConsentError>,
    /// The annotation [`ALLOW_HOSTS`] as it is written, trimmed.
    hosts_text: String,
    hosts: Result<Vec<RegistryPattern>, ConsentError>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum UserPattern {
    Everybody,
    Job(String),
    NodeImage(String),
}

/// An annotation that cannot be read, so that it allows nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsentError {
    /// An entry of [`ALLOW`] is no name and no pattern.
    #[error(
        "the annotation {ALLOW} has {0:?}, which is no name: write names of jobs, with * for any text, separated by commas; nodeimage/NAME for a NodeImage; or * for everybody"
    )]
    User(String),
    /// An entry of [`ALLOW_HOSTS`] is no pattern of registries.
    #[error(
        "the annotation {ALLOW_HOSTS} has {0:?}, which is no registry: write host, host:port or host/path, with * for any text in one label of the host"
    )]
    Host(String),
}

/// Why a user may not use a Secret. A text for its owner; the user must not see it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsentRefusal {
    /// There is no annotation [`ALLOW`], or an empty one.
    #[error("its owner has allowed no use of it")]
    Unannotated,
    /// Others are allowed.
    #[error("only {0:?} is allowed to use it")]
    Others(String),
    /// The annotation cannot be read.
    #[error(transparent)]
    Malformed(ConsentError),
}

impl Consent {
    /// Reads the annotations of a Secret.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Self {
        let text = |key| annotations.get(key).map_or("", |text| text.trim());
        let users = entries(text(ALLOW)).map(UserPattern::parse).collect();
        let host = |entry| RegistryPattern::parse(entry).map_err(|_| ConsentError::Host(abbreviate(entry)));
        let hosts = entries(text(ALLOW_HOSTS)).map(host).collect();
        Self { text: text(ALLOW).to_owned(), users, hosts_text: text(ALLOW_HOSTS).to_owned(), hosts }
    }

    /// Whether the Secret may be used by this one.
    pub fn check(&self, user: SecretUser<'_>) -> Result<(), ConsentRefusal> {
        match &self.users {
            Err(error) => Err(ConsentRefusal::Malformed(error.clone())),
            Ok(users) if users.iter().any(|pattern| pattern.matches(user)) => Ok(()),
            Ok(users) if users.is_empty() => Err(ConsentRefusal::Unannotated),
            Ok(_) => Err(ConsentRefusal::Others(abbreviate(&self.text))),
        }
    }

    /// Whether entries for wildcard hosts may be used for this image.
    pub fn check_wildcards(&self, reference: &NormalizedReference) -> Result<bool, ConsentError> {
        let hosts = self.hosts.as_ref().map_err(Clone::clone)?;
        Ok(hosts.iter().any(|pattern| pattern.matches(reference)))
    }

    /// The value of [`ALLOW`] that also lets this user use the Secret. `None` where the annotation must be corrected first.
    pub fn extended_by(&self, user: SecretUser<'_>) -> Option<String> {
        let users = self.users.as_ref().ok()?;
        Some(if users.is_empty() { user.to_string() } else { format!("{},{user}", self.text) })
    }

    /// The value of [`ALLOW_HOSTS`] that also lets wildcard entries serve this host. `None` if the host is listed.
    ///
    /// # Errors
    /// The annotation must be corrected first.
    pub fn extended_to(&self, host: &str) -> Result<Option<String>, ConsentError> {
        let hosts = self.hosts.as_ref().map_err(Clone::clone)?;
        if entries(&self.hosts_text).any(|listed| listed == host) {
            return Ok(None);
        }
        Ok(Some(if hosts.is_empty() { host.to_owned() } else { format!("{},{host}", self.hosts_text) }))
    }
}

/// As an entry of [`ALLOW`].
impl fmt::Display for SecretUser<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(name) => f.write_str(name),
            Self::NodeImage(name) => write!(f, "{NODE_IMAGE}{name}"),
        }
    }
}

impl UserPattern {
    fn parse(entry: &str) -> Result<Self, ConsentError> {
        let is_pattern = |name: &str| {
            let is_part =
                |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.' | b'*');
            !name.is_empty() && name.bytes().all(is_part)
        };
        match entry.strip_prefix(NODE_IMAGE) {
            _ if entry == "*" => Ok(Self::Everybody),
            Some(name) if is_pattern(name) => Ok(Self::NodeImage(name.to_owned())),
            None if is_pattern(entry) => Ok(Self::Job(entry.to_owned())),
            _ => Err(ConsentError::User(abbreviate(entry))),
        }
    }

    fn matches(&self, user: SecretUser<'_>) -> bool {
        match (self, user) {
            (Self::Everybody, _) => true,
            (Self::Job(pattern), SecretUser::Job(name))
            | (Self::NodeImage(pattern), SecretUser::NodeImage(name)) => glob_matches(pattern, name),
            (Self::Job(_), SecretUser::NodeImage(_)) | (Self::NodeImage(_), SecretUser::Job(_)) => false,
        }
    }
}

/// The entries of a list. An empty one is a slip without a meaning, such as a comma at the end.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|entry| !entry.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Reference;

    fn consent(allow: Option<&str>, hosts: Option<&str>) -> Consent {
        let annotations = [(ALLOW, allow), (ALLOW_HOSTS, hosts)];
        let annotations =
            annotations.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())));
        Consent::from_annotations(&annotations.collect())
    }

    #[test]
    fn an_annotation_allows_only_named_users() {
        let (job, node) = (SecretUser::Job("shop.release-2"), SecretUser::NodeImage("edge-1"));
        for (allow, is_job, is_node) in [
            (None, false, false),
            (Some(""), false, false),
            (Some(" , "), false, false),
            (Some("*"), true, true),
            (Some("other, *"), true, true),
            (Some("shop.release-2"), true, false),
            (Some("a,shop.release-2,b,"), true, false),
            (Some("a\n  shop.release-2\n"), true, false),
            (Some("shop.*"), true, false),
            (Some("*release*"), true, false),
            (Some("**"), true, false),
            (Some("shop.release"), false, false),
            (Some("hop.release-2"), false, false),
            (Some("edge-1"), false, false),
            (Some("nodeimage/edge-1"), false, true),
            (Some("nodeimage/*"), false, true),
            (Some("nodeimage/edge"), false, false),
            (Some("nodeimage/shop.release-2"), false, false),
        ] {
            let consent = consent(allow, None);
            assert_eq!(
                (consent.check(job).is_ok(), consent.check(node).is_ok()),
                (is_job, is_node),
                "{allow:?}"
            );
        }
    }

    #[test]
    fn an_unreadable_annotation_allows_no_user() {
        for (allow, entry) in [
            ("*,Shop", "Shop"),
            ("a;b,*", "a;b"),
            ("*,nodeimage/", "nodeimage/"),
            ("nodeimages/edge-1,*", "nodeimages/edge-1"),
            ("default/harbor", "default/harbor"),
            ("'*'", "'*'"),
        ] {
            let consent = consent(Some(allow), None);
            let refusal = consent.check(SecretUser::Job("a")).unwrap_err();
            assert_eq!(refusal, ConsentRefusal::Malformed(ConsentError::User(entry.to_owned())), "{allow}");
            assert!(refusal.to_string().contains("separated by commas"), "{refusal}");
            assert_eq!(consent.extended_by(SecretUser::Job("a")), None);
        }
    }

    #[test]
    fn wildcards_serve_the_hosts_that_are_named_and_no_others() {
        let of = |image: &str| Reference::parse(image).unwrap().normalized();
        for (hosts, image, is_allowed) in [
            (None, "a.example.com/app", false),
            (Some("a.example.com"), "a.example.com/app", true),
            (Some("b.example.com, a.example.com"), "a.example.com/app", true),
            (Some("*.example.com"), "a.example.com/app", true),
            (Some("*.example.com"), "evil.example.org/app", false),
            (Some("a.example.com"), "a.example.com:5000/app", false),
            (Some("a.example.com/team"), "a.example.com/team/app", true),
            (Some("a.example.com/team"), "a.example.com/other/app", false),
            (Some("docker.io"), "nginx", true),
        ] {
            assert_eq!(consent(None, hosts).check_wildcards(&of(image)), Ok(is_allowed), "{hosts:?} {image}");
        }
        let bad = consent(Some("*"), Some("a.example.com, b c:x"));
        assert_eq!(bad.check_wildcards(&of("a.example.com/app")), Err(ConsentError::Host("c:x".to_owned())));
        assert_eq!(bad.check(SecretUser::Job("a")), Ok(()), "entries without a wildcard are not concerned");
    }

    #[test]
    fn hosts_are_added_once_and_to_readable_lists() {
        for (hosts, host, expected) in [
            (None, "a.example", Some("a.example")),
            (Some("a.example b.example"), "c.example", Some("a.example b.example,c.example")),
            (Some("a.example, b.example"), "b.example", None),
        ] {
            let extended = consent(None, hosts).extended_to(host);
            assert_eq!(extended, Ok(expected.map(str::to_owned)), "{hosts:?} {host}");
        }
        let bad = consent(None, Some("c:x")).extended_to("a.example");
        assert_eq!(bad, Err(ConsentError::Host("c:x".to_owned())));
    }

    #[test]
    fn a_refusal_names_the_annotation_to_write() {
        let job = SecretUser::Job("new");
        let (nobody, others) = (consent(None, None), consent(Some("a, b-*"), None));
        assert_eq!(nobody.check(job).unwrap_err().to_string(), "its owner has allowed no use of it");
        assert_eq!(others.check(job).unwrap_err().to_string(), "only \"a, b-*\" is allowed to use it");
        assert_eq!(nobody.extended_by(SecretUser::NodeImage("edge-1")).as_deref(), Some("nodeimage/edge-1"));
        assert_eq!(others.extended_by(job).as_deref(), Some("a, b-*,new"));
    }
}
