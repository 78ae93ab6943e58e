//! Rules that replace parts of an image reference, or its secrets, for a group of nodes.
//!
//! Image rules are Karmada's ImageOverrider (`pkg/util/overridemanager/imageoverride.go`), which KubeEdge's
//! EdgeApplication uses as well: each rule edits one part of the *text* of the reference, and the next rule
//! reads that text anew. What we add is that nothing is lost or ignored silently (see [`ImageRule`]).

use std::fmt;

use crate::image::{Reference, ReferenceError, is_digest, is_tag, joined, shown};

mod secret_ref;
#[cfg(test)]
mod tests;

pub(crate) use secret_ref::is_dns_subdomain;
pub use secret_ref::{SecretRef, SecretRefError};

/// What a rule does with its part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Appends to the part, with nothing between; an absent part becomes the value.
    Add(String),
    /// The part becomes the value, whether or not it was there.
    Replace(String),
    /// The part goes.
    Remove,
}

/// The part of a reference that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageComponent {
    /// Host and port, as written.
    Registry,
    /// The path, as written.
    Repository,
    /// Tag and digest.
    Tag,
}

/// One rule for image references.
///
/// Where Karmada is silent or lossy:
/// - A `Tag` value is a tag, `sha256:…` or `@sha256:…`. A replaced tag drops the digest, a removed tag drops
///   both, and a tag that is added to drops the digest too: it was another image's.
/// - `Tag add` of a digest pins a reference that has no digest yet and leaves its tag. Nothing can be added to a
///   digest.
/// - A changed registry or repository keeps tag and digest.
/// - A result that is no reference is an error, and so is a rule without a repository to work on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ImageRule {
    component: ImageComponent,
    operation: Operation,
}

/// The part of a secret's name that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SecretComponent {
    /// The name.
    SecretName,
    /// The namespace.
    Namespace,
}

/// One rule for the secrets of an image.
///
/// - `replace` changes that part of each secret. An image without a secret stays without: there is nothing to
///   replace, and an image that is pulled anonymously elsewhere needs none here.
/// - `remove` drops all secrets, whichever the component: the image is pulled anonymously.
/// - `add` appends one more secret to try, `[namespace/]name`. What is left out is taken from the first secret
///   of the image: the namespace under `SecretName`, the name under `Namespace`. Where there is none to take it
///   from, that is an error and not an anonymous pull.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecretRule {
    component: SecretComponent,
    operation: Operation,
}

/// A rule that cannot be read, or cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    /// The component is none.
    #[error("unknown component {found:?}: use {allowed}")]
    Component {
        /// What stands there.
        found: String,
        /// What may.
        allowed: &'static str,
    },
    /// The operator is none.
    #[error("unknown operator {0:?}: use add, replace or remove")]
    Operator(String),
    /// No value where one is needed.
    #[error("the operator {0} needs a value")]
    NoValue(&'static str),
    /// A tag value that is neither tag nor digest.
    #[error("{0:?} is neither a tag nor a digest: write 1.25, sha256:… or @sha256:…")]
    TagValue(String),
    /// A secret value that is no name.
    #[error(transparent)]
    SecretValue(#[from] SecretRefError),
    /// Nothing can be appended to a digest.
    #[error("{rule} cannot be applied to {image}: nothing can be added to a digest; use replace")]
    AddToDigest {
        /// The rule, as it displays.
        rule: String,
        /// The reference before it.
        image: String,
    },
    /// The reference has a digest already.
    #[error("{rule} cannot be applied to {image}: it has a digest already; use replace")]
    SecondDigest {
        /// The rule, as it displays.
        rule: String,
        /// The reference before it.
        image: String,
    },
    /// The rule makes something else than a reference.
    #[error("{rule} makes {result:?} of {image}, which is no image reference: {why}")]
    Result {
        /// The rule, as it displays.
        rule: String,
        /// The reference before it.
        image: String,
        /// The text after it.
        result: String,
        /// What is wrong with that text.
        why: Box<ReferenceError>,
    },
    /// A secret without namespace, or without name, and no other secret to take it from.
    #[error(
        "{rule} gives no {missing}, and the image has no secret to take it from: write {{namespace}}/{{name}}"
    )]
    Incomplete {
        /// The rule, as it displays.
        rule: String,
        /// `namespace` or `name`.
        missing: &'static str,
    },
}

impl Operation {
    fn parse(operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let value = value.filter(|v| !v.is_empty()).map(str::to_owned);
        match operator {
            "add" => value.map(Self::Add).ok_or(OverrideError::NoValue("add")),
            "replace" => value.map(Self::Replace).ok_or(OverrideError::NoValue("replace")),
            // Karmada ignores a value here, too.
            "remove" => Ok(Self::Remove),
            other => Err(OverrideError::Operator(shown(other))),
        }
    }

    /// The part after the operation. `add` sets a part that is absent.
    fn edit(&self, part: Option<&str>) -> Option<String> {
        match self {
            Self::Add(value) => Some(format!("{}{value}", part.unwrap_or_default())),
            Self::Replace(value) => Some(value.clone()),
            Self::Remove => None,
        }
    }
}

impl ImageRule {
    /// Reads a rule as the API has it. An empty value is no value.
    pub fn parse(component: &str, operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let component = match component {
            "Registry" => ImageComponent::Registry,
            "Repository" => ImageComponent::Repository,
            "Tag" => ImageComponent::Tag,
            other => {
                let allowed = "Registry, Repository or Tag";
                return Err(OverrideError::Component { found: shown(other), allowed });
            }
        };
        let operation = Operation::parse(operator, value)?;
        if component == ImageComponent::Tag {
            match &operation {
                Operation::Replace(value) if !is_tag(value) && as_digest(value).is_none() => {
                    return Err(OverrideError::TagValue(shown(value)));
                }
                // What is added must be the end of some tag; `1` is put before it to allow a leading dash.
                Operation::Add(value) if !is_tag(&format!("1{value}")) && as_digest(value).is_none() => {
                    return Err(OverrideError::TagValue(shown(value)));
                }
                _ => {}
            }
        }
        Ok(Self { component, operation })
    }

    /// Applies the rule. What comes out is read anew, as Karmada does: `Registry replace r.io/mirror` makes
    /// `r.io` the registry that the next rule sees.
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
        let text = joined(registry.as_deref(), &repository, tag.as_deref(), digest.as_deref());
        Reference::parse(&text).map_err(|why| OverrideError::Result {
            rule: self.to_string(),
            image: image.to_string(),
            result: shown(&text),
            why: Box::new(why),
        })
    }

    fn edit_tag(&self, image: &Reference) -> Result<(Option<String>, Option<String>), OverrideError> {
        let tag = image.tag().map(str::to_owned);
        match &self.operation {
            Operation::Remove => Ok((None, None)),
            Operation::Replace(value) => Ok(match as_digest(value) {
                Some(digest) => (None, Some(digest.to_owned())),
                None => (Some(value.clone()), None),
            }),
            Operation::Add(value) => match (as_digest(value), tag, image.digest()) {
                (Some(_), _, Some(_)) => {
                    Err(OverrideError::SecondDigest { rule: self.to_string(), image: image.to_string() })
                }
                (Some(digest), tag, None) => Ok((tag, Some(digest.to_owned()))),
                (None, None, Some(_)) => {
                    Err(OverrideError::AddToDigest { rule: self.to_string(), image: image.to_string() })
                }
                (None, tag, _) => Ok((self.operation.edit(tag.as_deref()), None)),
            },
        }
    }
}

impl SecretRule {
    /// Reads a rule as the API has it. An empty value is no value.
    pub fn parse(component: &str, operator: &str, value: Option<&str>) -> Result<Self, OverrideError> {
        let component = match component {
            "SecretName" => SecretComponent::SecretName,
            "Namespace" => SecretComponent::Namespace,
            other => {
                let allowed = "SecretName or Namespace";
                return Err(OverrideError::Component { found: shown(other), allowed });
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

    /// Applies the rule. The same secret is never listed twice.
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

/// Applies image rules in order, each to the result of the one before.
pub fn apply_image_rules(image: &Reference, rules: &[ImageRule]) -> Result<Reference, OverrideError> {
    rules.iter().try_fold(image.clone(), |image, rule| rule.apply(&image))
}

/// Applies secret rules in order, each to the result of the one before.
pub fn apply_secret_rules(
    secrets: Vec<SecretRef>,
    rules: &[SecretRule],
) -> Result<Vec<SecretRef>, OverrideError> {
    rules.iter().try_fold(secrets, |secrets, rule| rule.apply(secrets))
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
            Self::Add(value) => write!(f, "add {:?}", shown(value)),
            Self::Replace(value) => write!(f, "replace {:?}", shown(value)),
            Self::Remove => f.write_str("remove"),
        }
    }
}

/// `sha256:…` or `@sha256:…`.
fn as_digest(value: &str) -> Option<&str> {
    let digest = value.strip_prefix('@').unwrap_or(value);
    is_digest(digest).then_some(digest)
}
