//! Label selectors with Kubernetes' meaning, in string form and in the API's object form.

use std::collections::BTreeMap;
use std::fmt;

mod error;
mod parse;
mod requirement;
#[cfg(test)]
mod tests;

pub use error::SelectorError;
use requirement::Requirement;

/// Requirements that must all hold. A selector without requirements selects every object, as in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

impl Selector {
    /// Parses Kubernetes' string form: `key`, `!key`, `key=value`, `key==value`, `key!=value`,
    /// `key in (a,b)`, `key notin (a,b)`, `key>1`, `key<1`, joined by commas. An empty text selects every object.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        Ok(Self { requirements: parse::parse_requirements(text)? })
    }

    /// Whether an object with these labels is selected.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| requirement.matches(labels))
    }

    /// The label of each requirement, and whether it must be present.
    pub fn keys(&self) -> impl Iterator<Item = (&str, bool)> {
        self.requirements.iter().map(|requirement| (requirement.key(), requirement.demands_presence()))
    }

    /// Whether the selector has no requirements, and so selects every object.
    pub fn selects_everything(&self) -> bool {
        self.requirements.is_empty()
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            requirement.fmt(f)?;
        }
        Ok(())
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
            requirements.push(Requirement::membership(key, false, vec![value.clone()])?);
        }
        for expression in selector.match_expressions.iter().flatten() {
            let (key, operator) = (&expression.key, &expression.operator);
            let values = expression.values.clone().unwrap_or_default();
            requirements.push(match operator.as_str() {
                "In" => Requirement::membership(key, false, values)?,
                "NotIn" => Requirement::membership(key, true, values)?,
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

#[cfg(feature = "crd")]
impl TryFrom<&Selector> for k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector {
    type Error = SelectorError;

    fn try_from(selector: &Selector) -> Result<Self, SelectorError> {
        let mut object = Self::default();
        for requirement in &selector.requirements {
            let (key, operator, mut values) = requirement.to_expression()?;
            let is_new = object.match_labels.as_ref().is_none_or(|labels| !labels.contains_key(&key));
            match values.pop() {
                // What people write by hand.
                Some(value) if operator == "In" && values.is_empty() && is_new => {
                    object.match_labels.get_or_insert_default().insert(key, value);
                }
                last => {
                    values.extend(last);
                    object.match_expressions.get_or_insert_default().push(
                        k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement {
                            key,
                            operator: operator.to_owned(),
                            values: Some(values).filter(|values| !values.is_empty()),
                        },
                    );
                }
            }
        }
        Ok(object)
    }
}
