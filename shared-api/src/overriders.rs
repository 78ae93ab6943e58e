//! Rules that edit an image reference, or the list of its secrets, for a group of nodes.
//!
//! Image rules are Karmada's ImageOverrider (`pkg/util/overridemanager/imageoverride.go`), which KubeEdge's
//! EdgeApplication uses as well: each rule edits one part of the *text* of the reference, and the next rule
//! parses the text that results. Beyond Karmada, nothing is lost or ignored silently (see [`ImageRule`]).

use std::fmt;

use crate::abbreviate::abbreviate;
use crate::image::{Reference, ReferenceError, is_digest, is_tag, join_parts, looks_like_host};

mod secret_ref;
#[cfg(test)]
mod tests;

pub use secret_ref::{SecretRef, SecretRefError};

/// What a rule does to the part that it names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Operation {
    /// Appends the value to the part, without a separator; an absent part becomes the value.
    Add(String),
    /// Sets the part to the value, whether or not it was present.
    Replace(String),
    /// Removes the part.
    Remove,
}

/// The part of a reference that a rule edits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ImageComponent {
    /// Host and port of the registry, as written.
    Registry,
    /// The repository path, as written.
    Repository,
    /// Tag and digest together.
    Tag,
}

/// A rule that edits an image reference.
///
/// Where Karmada leaves the outcome open or loses a part:
/// - The value for `Tag` is a tag, `sha256:…` or `@sha256:…`. Replacing the tag drops the digest, which is that of
///   another image; removing the tag drops both.
/// - `Tag add` with a digest pins a reference that has no digest yet, and keeps its tag. Nothing can be added to a
///   reference with a digest: it would pin the wrong image, and without it nothing would be pinned any more.
/// - Changing the registry or the repository keeps tag and digest.
/// - A registry begins with a host. What Docker would read as a path at docker.io is an error.
/// - A result that is not a reference is an error, and so is the removal of the repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ImageRule {
    component: ImageComponent,
    operation: Operation,
}

/// The part of a secret's name that a rule edits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SecretComponent {
    /// The name within the namespace.
    SecretName,
    /// The namespace.
    Namespace,
}

/// A rule that edits the secrets of an image.
///
/// - `replace` changes one part of every secret. An image without a secret remains without one: there is nothing to
///   replace, and an image that is pulled anonymously elsewhere needs no secret here.
/// - `remove` drops all secrets, whichever the component: the image is pulled anonymously.
/// - `add` appends a secret to try. Its value is `namespace/name`, or a name with `SecretName`, or a namespace with
///   `Namespace`; the missing half is taken from the first secret of the image. If the image has no secret, that is
///   an error and not an anonymous pull.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecretRule {
    component: SecretComponent,
    operation: Operation,
}

/// Why a rule cannot be parsed, or cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    /// The component is unknown.
    #[error("unknown component {found:?}: use {allowed}")]
    Component {
        /// The unknown component.
        found: String,
        /// The components that exist.
        allowed: &'static str,
    },
    /// The operator is unknown.
    #[error("unknown operator {0:?}: use add, replace or remove")]
    Operator(String),
    /// The repository is removed.
    #[error("an image has one repository, which cannot be removed: use replace")]
    RemoveRepository,
    /// The value is missing, and the operator needs one.
    #[error("the operator {0} needs a value")]
    NoValue(&'static str),
    /// The value for a tag is neither a tag nor a digest.
    #[error("{0:?} is neither a tag nor a digest: write 1.25, sha256:… or @sha256:…")]
    TagValue(String),
    /// The value for a registry does not begin with a host.
    #[error(transparent)]
    RegistryValue(ReferenceError),
    /// The value for a secret is not a valid name.
    #[error(transparent)]
    SecretValue(#[from] SecretRefError),
    /// The rule would append to the tag of a reference with a digest.
    #[error("{rule} cannot be applied to {image}: the digest is that of another image; use replace")]
    AddToDigest {
        /// The rule, as displayed.
        rule: String,
        /// The reference that the rule was applied to.
        image: String,
    },
    /// The rule would add a second digest.
    #[error("{rule} cannot be applied to {image}: it has a digest already; use replace")]
    SecondDigest {
        /// The rule, as displayed.
        rule: String,
        /// The reference that the rule was applied to.
        image: String,
    },
    /// The result of the rule is not a reference.
    #[error("{rule} makes {result:?} of {image}, which is no image reference: {why}")]
    Result {
        /// The rule, as displayed.
        rule: String,
        /// The reference that the rule was applied to.
        image: String,
        /// The text that the rule produced.
        result: String,
        /// What is wrong with the produced text.
        why: Box<ReferenceError>,
    },
    /// The rule adds half of a secret's name, and there is no secret to take the other half from.
    #[error(
        "{rule} gives no {missing}, and the image has no secret to take it from: write {{namespace}}/{{name}}"
    )]
    Incomplete {
        /// The rule, as displayed.
        rule: String,
        /// The half that is missing: `namespace` or `name`.
        missing: &'static str,
    },
}

impl Operation {
    fn parse(operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let value = value.filter(|v| !v.is_empty()).map(str::to_owned);
        match operator {
            "add" => value.map(Self::Add).ok_or(OverrideError::NoValue("add")),
            "replace" => value.map(Self::Replace).ok_or(OverrideError::NoValue("replace")),
            // Karmada ignores the value of `remove`, too.
            "remove" => Ok(Self::Remove),
            other => Err(OverrideError::Operator(abbreviate(other))),
        }
    }

    /// Returns the part as it is after the operation.
    fn edit(&self, part: Option<&str>) -> Option<String> {
        match self {
            Self::Add(value) => Some(format!("{}{value}", part.unwrap_or_default())),
            Self::Replace(value) => Some(value.clone()),
            Self::Remove => None,
        }
    }
}

impl ImageRule {
    /// The bytes by which the rule lengthens a reference, at most.
    pub fn added_bytes(&self) -> usize {
        match &self.operation {
            Operation::Add(value) | Operation::Replace(value) => value.len(),
            Operation::Remove => 0,
        }
    }

    /// Parses a rule of the API. An empty value counts as no value.
    pub fn parse(component: &str, operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let component = match component {
            "Registry" => ImageComponent::Registry,
            "Repository" => ImageComponent::Repository,
            "Tag" => ImageComponent::Tag,
            other => {
                let allowed = "Registry, Repository or Tag";
                return Err(OverrideError::Component { found: abbreviate(other), allowed });
            }
        };
        let operation = Operation::parse(operator, value)?;
        match (component, &operation) {
            (ImageComponent::Repository, Operation::Remove) => return Err(OverrideError::RemoveRepository),
            (ImageComponent::Registry, Operation::Replace(value)) => {
                check_registry(value).map_err(OverrideError::RegistryValue)?;
            }
            (ImageComponent::Tag, Operation::Replace(value))
                if !is_tag(value) && strip_to_digest(value).is_none() =>
            {
                return Err(OverrideError::TagValue(abbreviate(value)));
            }
            // The value must be a tag, or the end of one: prefixed with `1`, it may begin with a dash.
            (ImageComponent::Tag, Operation::Add(value))
                if !is_tag(value) && !is_tag(&format!("1{value}")) && strip_to_digest(value).is_none() =>
            {
                return Err(OverrideError::TagValue(abbreviate(value)));
            }
            _ => {}
        }
        Ok(Self { component, operation })
    }

    /// Applies the rule. The resulting text is parsed again, as Karmada does: after `Registry replace r.io/mirror`,
    /// the next rule sees the registry `r.io`.
    pub fn apply(&self, image: &Reference) -> Result<Reference, OverrideError> {
        let (mut registry, mut repository) =
            (image.registry().map(str::to_owned), Some(image.repository().to_owned()));
        let (mut tag, mut digest) = (image.tag().map(str::to_owned), image.digest().map(str::to_owned));
        match self.component {
            ImageComponent::Registry => registry = self.operation.edit(registry.as_deref()),
            ImageComponent::Repository => repository = self.operation.edit(repository.as_deref()),
            ImageComponent::Tag => (tag, digest) = self.edit_tag(image)?,
        }
        let repository = repository.unwrap_or_default();
        let text = join_parts(registry.as_deref(), &repository, tag.as_deref(), digest.as_deref());
        let checked = match (self.component, &registry) {
            (ImageComponent::Registry, Some(registry)) => check_registry(registry),
            _ => Ok(()),
        };
        checked.and_then(|()| Reference::parse(&text)).map_err(|why| OverrideError::Result {
            rule: self.to_string(),
            image: image.to_string(),
            result: abbreviate(&text),
            why: Box::new(why),
        })
    }

    fn edit_tag(&self, image: &Reference) -> Result<(Option<String>, Option<String>), OverrideError> {
        let tag = image.tag().map(str::to_owned);
        match &self.operation {
            Operation::Remove => Ok((None, None)),
            Operation::Replace(value) => Ok(match strip_to_digest(value) {
                Some(digest) => (None, Some(digest.to_owned())),
                None => (Some(value.clone()), None),
            }),
            Operation::Add(value) => match (strip_to_digest(value), tag, image.digest()) {
                (Some(_), _, Some(_)) => {
                    Err(OverrideError::SecondDigest { rule: self.to_string(), image: image.to_string() })
                }
                (Some(digest), tag, None) => Ok((tag, Some(digest.to_owned()))),
                (None, _, Some(_)) => {
                    Err(OverrideError::AddToDigest { rule: self.to_string(), image: image.to_string() })
                }
                (None, tag, None) => Ok((self.operation.edit(tag.as_deref()), None)),
            },
        }
    }
}

impl SecretRule {
    /// Parses a rule of the API. An empty value counts as no value.
    pub fn parse(component: &str, operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let component = match component {
            "SecretName" => SecretComponent::SecretName,
            "Namespace" => SecretComponent::Namespace,
            other => {
                let allowed = "SecretName or Namespace";
                return Err(OverrideError::Component { found: abbreviate(other), allowed });
            }
        };
        let operation = Operation::parse(operator, value)?;
        match (&operation, component) {
            (Operation::Add(value), _) if value.contains('/') => {
                SecretRef::parse(value)?;
            }
            (Operation::Add(value) | Operation::Replace(value), SecretComponent::SecretName) => {
                SecretRef::new("default", value)?;
            }
            (Operation::Add(value) | Operation::Replace(value), SecretComponent::Namespace) => {
                SecretRef::new(value, "name")?;
            }
            (Operation::Remove, _) => {}
        }
        Ok(Self { component, operation })
    }

    /// Whether an image without a secret may have one by this rule.
    pub fn adds(&self) -> bool {
        matches!(self.operation, Operation::Add(_))
    }

    /// Applies the rule, and removes secrets that are listed twice.
    pub fn apply(&self, mut secrets: Vec<SecretRef>) -> Result<Vec<SecretRef>, OverrideError> {
        match &self.operation {
            Operation::Remove => secrets.clear(),
            Operation::Replace(value) => {
                for secret in &mut secrets {
                    match self.component {
                        SecretComponent::SecretName => value.clone_into(&mut secret.name),
                        SecretComponent::Namespace => value.clone_into(&mut secret.namespace),
                    }
                }
            }
            Operation::Add(value) => {
                let first = secrets.first();
                let incomplete = |missing| OverrideError::Incomplete { rule: self.to_string(), missing };
                let added = match (SecretRef::parse(value), self.component) {
                    (Ok(secret), _) => secret,
                    (Err(_), SecretComponent::SecretName) => {
                        let namespace = &first.ok_or_else(|| incomplete("namespace"))?.namespace;
                        SecretRef { namespace: namespace.clone(), name: value.clone() }
                    }
                    (Err(_), SecretComponent::Namespace) => {
                        let name = &first.ok_or_else(|| incomplete("name"))?.name;
                        SecretRef { namespace: value.clone(), name: name.clone() }
                    }
                };
                secrets.push(added);
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        secrets.retain(|secret| seen.insert(secret.clone()));
        Ok(secrets)
    }
}

impl fmt::Display for ImageRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let component = match self.component {
            ImageComponent::Registry => "Registry",
            ImageComponent::Repository => "Repository",
            ImageComponent::Tag => "Tag",
        };
        write!(f, "{component} {}", self.operation)
    }
}

impl fmt::Display for SecretRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let component = match self.component {
            SecretComponent::SecretName => "SecretName",
            SecretComponent::Namespace => "Namespace",
        };
        write!(f, "{component} {}", self.operation)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(value) => write!(f, "add {:?}", abbreviate(value)),
            Self::Replace(value) => write!(f, "replace {:?}", abbreviate(value)),
            Self::Remove => f.write_str("remove"),
        }
    }
}

/// Refuses a registry, with or without a path behind it, that Docker would read as a path at docker.io.
fn check_registry(registry: &str) -> Result<(), ReferenceError> {
    let host = registry.split('/').next().unwrap_or_default();
    if looks_like_host(host) { Ok(()) } else { Err(ReferenceError::NotAHost(abbreviate(host))) }
}

/// Returns the digest of `sha256:…` or `@sha256:…`, and nothing for any other text.
fn strip_to_digest(value: &str) -> Option<&str> {
    let digest = value.strip_prefix('@').unwrap_or(value);
    is_digest(digest).then_some(digest)
}
