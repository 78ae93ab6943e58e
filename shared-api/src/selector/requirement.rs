//! Requirements of a label selector.

use std::collections::BTreeMap;
use std::fmt;

use super::error::SelectorError;
use crate::abbreviate::abbreviate;
use crate::dns_name::is_dns_subdomain;

/// One requirement. The values have been checked against the operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Requirement {
    key: String,
    operator: Operator,
}

/// Kubernetes' operators. `=` and `==` are `In` with one value, `!=` is `NotIn` with one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Operator {
    In(Vec<String>),
    /// Also holds if the key is absent.
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
    /// Holds only if the label's value is an integer.
    GreaterThan(i64),
    /// Holds only if the label's value is an integer.
    LessThan(i64),
}

impl Requirement {
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Whether no object without the label fulfils it.
    pub(super) fn demands_presence(&self) -> bool {
        !matches!(self.operator, Operator::NotIn(_) | Operator::DoesNotExist)
    }

    /// `key in (values)`, or `key notin (values)` if negated. Checks the key, the values and that there are any.
    pub(super) fn membership(key: &str, negated: bool, values: Vec<String>) -> Result<Self, SelectorError> {
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

    /// `key`, or `!key` if it must not be present.
    pub(super) fn presence(key: &str, present: bool) -> Result<Self, SelectorError> {
        check_key(key)?;
        let operator = if present { Operator::Exists } else { Operator::DoesNotExist };
        Ok(Self { key: key.to_owned(), operator })
    }

    /// `key>value`, or `key<value`.
    pub(super) fn comparison(key: &str, greater: bool, value: &str) -> Result<Self, SelectorError> {
        check_key(key)?;
        let number = value
            .parse()
            .map_err(|_| SelectorError::NotAnInteger { key: key.to_owned(), value: value.to_owned() })?;
        // Kubernetes refuses a sign as well: no label has one.
        check_value(key, value)?;
        let operator = if greater { Operator::GreaterThan(number) } else { Operator::LessThan(number) };
        Ok(Self { key: key.to_owned(), operator })
    }

    /// Key, operator and values of the API's object form, which has no comparisons.
    #[cfg(feature = "crd")]
    pub(super) fn to_expression(&self) -> Result<(String, &'static str, Vec<String>), SelectorError> {
        let (operator, values) = match &self.operator {
            Operator::In(values) => ("In", values.clone()),
            Operator::NotIn(values) => ("NotIn", values.clone()),
            Operator::Exists => ("Exists", Vec::new()),
            Operator::DoesNotExist => ("DoesNotExist", Vec::new()),
            Operator::GreaterThan(_) | Operator::LessThan(_) => {
                return Err(SelectorError::NoObjectForm { requirement: self.to_string() });
            }
        };
        Ok((self.key.clone(), operator, values))
    }

    pub(super) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
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

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, operator } = self;
        match operator {
            Operator::In(values) if values.len() == 1 => write!(f, "{key}={}", values[0]),
            Operator::NotIn(values) if values.len() == 1 => write!(f, "{key}!={}", values[0]),
            Operator::In(values) => write!(f, "{key} in ({})", values.join(",")),
            Operator::NotIn(values) => write!(f, "{key} notin ({})", values.join(",")),
            Operator::Exists => write!(f, "{key}"),
            Operator::DoesNotExist => write!(f, "!{key}"),
            Operator::GreaterThan(bound) => write!(f, "{key}>{bound}"),
            Operator::LessThan(bound) => write!(f, "{key}<{bound}"),
        }
    }
}

/// Longest value, and longest name of a key without its prefix, in bytes.
const MAX_LABEL: usize = 63;

fn check_key(key: &str) -> Result<(), SelectorError> {
    let (prefix_is_fine, name) = match key.split_once('/') {
        Some((prefix, name)) => (is_dns_subdomain(prefix), name),
        None => (true, key),
    };
    if prefix_is_fine && !name.is_empty() && is_label_text(name) {
        Ok(())
    } else {
        Err(SelectorError::Key { key: abbreviate(key) })
    }
}

fn check_value(key: &str, value: &str) -> Result<(), SelectorError> {
    if value.is_empty() || is_label_text(value) {
        Ok(())
    } else {
        Err(SelectorError::Value { key: key.to_owned(), value: abbreviate(value) })
    }
}

fn is_label_text(text: &str) -> bool {
    let alnum = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    text.len() <= MAX_LABEL
        && alnum(text.bytes().next())
        && alnum(text.bytes().last())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}
