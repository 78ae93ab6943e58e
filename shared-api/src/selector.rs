//! Label selectors with Kubernetes' meaning, from their string form and from the API's object form.

use std::collections::BTreeMap;
use std::fmt;

mod parse;
#[cfg(test)]
mod tests;

/// Requirements that must all hold. None holds for every object, as in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

/// One requirement. The values have been checked against the operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Requirement {
    key: String,
    operator: Operator,
}

/// Kubernetes' operators. `=`, `==` and `!=` are the sets of one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Operator {
    In(Vec<String>),
    /// Holds where the key is absent, too.
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
    /// Holds only where the label's value is an integer.
    GreaterThan(i64),
    LessThan(i64),
}

/// Why a text or an object is no label selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The text breaks the grammar.
    #[error("label selector {text:?}: found {found} where {expected} is expected")]
    Syntax {
        /// The whole text.
        text: String,
        /// What stands there.
        found: String,
        /// What may stand there.
        expected: &'static str,
    },
    /// Not a label key.
    #[error(
        "{key:?} is not a label key: it takes letters, digits, - _ and . (at most 63, a letter or digit at both ends), after an optional DNS name and a slash"
    )]
    Key {
        /// The key.
        key: String,
    },
    /// Not a label value.
    #[error(
        "{value:?} is not a value that label {key} can have: it takes at most 63 letters, digits, - _ and ., a letter or digit at both ends"
    )]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// `in` or `notin` without values.
    #[error("label {key}: the operator {operator} needs at least one value")]
    NoValues {
        /// The key.
        key: String,
        /// The operator.
        operator: String,
    },
    /// `Exists` or `DoesNotExist` with values.
    #[error("label {key}: the operator {operator} takes no values")]
    UnexpectedValues {
        /// The key.
        key: String,
        /// The operator.
        operator: String,
    },
    /// `<` or `>` with something else than an integer.
    #[error("label {key}: {value:?} is not an integer, and < and > compare integers")]
    NotAnInteger {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// An operator that label selectors do not have.
    #[error("label {key}: unknown operator {operator:?}: use In, NotIn, Exists or DoesNotExist")]
    UnknownOperator {
        /// The key.
        key: String,
        /// The operator.
        operator: String,
    },
}

impl Selector {
    /// Reads Kubernetes' string form: `key`, `!key`, `key=value`, `key==value`, `key!=value`,
    /// `key in (a,b)`, `key notin (a,b)`, `key>1`, `key<1`, joined by commas. Empty: every object.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        parse::selector(text)
    }

    /// Whether an object with these labels is selected.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| requirement.matches(labels))
    }

    /// Whether every object is selected.
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }
}

impl Requirement {
    /// `key` with one of the set operators; checks key, values and their number.
    fn set(key: &str, negated: bool, values: Vec<String>) -> Result<Self, SelectorError> {
        check_key(key)?;
        if values.is_empty() {
            let operator = if negated { "notin" } else { "in" }.to_owned();
            return Err(SelectorError::NoValues { key: key.to_owned(), operator });
        }
        for value in &values {
            check_value(key, value)?;
        }
        let operator = if negated { Operator::NotIn(values) } else { Operator::In(values) };
        Ok(Self { key: key.to_owned(), operator })
    }

    fn presence(key: &str, present: bool) -> Result<Self, SelectorError> {
        check_key(key)?;
        let operator = if present { Operator::Exists } else { Operator::DoesNotExist };
        Ok(Self { key: key.to_owned(), operator })
    }

    fn comparison(key: &str, greater: bool, value: &str) -> Result<Self, SelectorError> {
        check_key(key)?;
        let number = value
            .parse()
            .map_err(|_| SelectorError::NotAnInteger { key: key.to_owned(), value: value.to_owned() })?;
        let operator = if greater { Operator::GreaterThan(number) } else { Operator::LessThan(number) };
        Ok(Self { key: key.to_owned(), operator })
    }

    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let number = || value.and_then(|v| v.parse::<i64>().ok());
        match &self.operator {
            Operator::In(values) => value.is_some_and(|v| values.contains(v)),
            Operator::NotIn(values) => value.is_none_or(|v| !values.contains(v)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::GreaterThan(bound) => number().is_some_and(|n| n > *bound),
            Operator::LessThan(bound) => number().is_some_and(|n| n < *bound),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { key, operator }) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match operator {
                Operator::In(values) if values.len() == 1 => write!(f, "{key}={}", values[0])?,
                Operator::NotIn(values) if values.len() == 1 => write!(f, "{key}!={}", values[0])?,
                Operator::In(values) => write!(f, "{key} in ({})", values.join(","))?,
                Operator::NotIn(values) => write!(f, "{key} notin ({})", values.join(","))?,
                Operator::Exists => write!(f, "{key}")?,
                Operator::DoesNotExist => write!(f, "!{key}")?,
                Operator::GreaterThan(bound) => write!(f, "{key}>{bound}")?,
                Operator::LessThan(bound) => write!(f, "{key}<{bound}")?,
            }
        }
        Ok(())
    }
}

impl std::str::FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

#[cfg(feature = "crd")]
impl TryFrom<&k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector> for Selector {
    type Error = SelectorError;

    fn try_from(
        selector: &k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
    ) -> Result<Self, SelectorError> {
        let mut requirements = Vec::new();
        for (key, value) in selector.match_labels.iter().flatten() {
            requirements.push(Requirement::set(key, false, vec![value.clone()])?);
        }
        for expression in selector.match_expressions.iter().flatten() {
            let (key, operator) = (&expression.key, &expression.operator);
            let values = expression.values.clone().unwrap_or_default();
            requirements.push(match operator.as_str() {
                "In" => Requirement::set(key, false, values)?,
                "NotIn" => Requirement::set(key, true, values)?,
                "Exists" | "DoesNotExist" if !values.is_empty() => {
                    return Err(SelectorError::UnexpectedValues {
                        key: key.clone(),
                        operator: operator.clone(),
                    });
                }
                "Exists" => Requirement::presence(key, true)?,
                "DoesNotExist" => Requirement::presence(key, false)?,
                _ => {
                    return Err(SelectorError::UnknownOperator {
                        key: key.clone(),
                        operator: operator.clone(),
                    });
                }
            });
        }
        Ok(Self { requirements })
    }
}

/// Longest name of a key, and longest value, by Kubernetes' rule.
const MAX_LABEL: usize = 63;

fn check_key(key: &str) -> Result<(), SelectorError> {
    let (prefix_is_fine, name) = match key.split_once('/') {
        Some((prefix, name)) => (crate::overriders::is_dns_subdomain(prefix), name),
        None => (true, key),
    };
    if prefix_is_fine && !name.is_empty() && is_label_text(name) {
        Ok(())
    } else {
        Err(SelectorError::Key { key: crate::image::shown(key) })
    }
}

fn check_value(key: &str, value: &str) -> Result<(), SelectorError> {
    if value.is_empty() || is_label_text(value) {
        Ok(())
    } else {
        Err(SelectorError::Value { key: key.to_owned(), value: crate::image::shown(value) })
    }
}

fn is_label_text(text: &str) -> bool {
    let alnum = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    text.len() <= MAX_LABEL
        && alnum(text.bytes().next())
        && alnum(text.bytes().last())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}
