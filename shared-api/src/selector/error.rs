//! Errors of label selectors.

/// Why a text or an object is not a label selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The text breaks the grammar.
    #[error("label selector {text:?}: found {found} where {expected} is expected")]
    Syntax {
        /// The selector, abbreviated.
        text: String,
        /// The token that was found.
        found: String,
        /// The tokens that are allowed in its place.
        expected: &'static str,
    },
    /// A text that is not a label key.
    #[error(
        "{key:?} is not a label key: it takes letters, digits, - _ and . (at most 63, a letter or digit at both ends), after an optional DNS name and a slash"
    )]
    Key {
        /// Key of the label.
        key: String,
    },
    /// A text that is not a label value.
    #[error(
        "{value:?} is not a value that label {key} can have: it takes at most 63 letters, digits, - _ and ., a letter or digit at both ends"
    )]
    Value {
        /// Key of the label.
        key: String,
        /// Value of the label.
        value: String,
    },
    /// `in` or `notin` without values.
    #[error("label {key}: the operator {operator} needs at least one value")]
    NoValues {
        /// Key of the label.
        key: String,
        /// Operator of the requirement.
        operator: String,
    },
    /// `Exists` or `DoesNotExist` with values.
    #[error("label {key}: the operator {operator} takes no values")]
    UnexpectedValues {
        /// Key of the label.
        key: String,
        /// Operator of the requirement.
        operator: String,
    },
    /// `<` or `>` with anything but an integer.
    #[error("label {key}: {value:?} is not an integer, and < and > compare integers")]
    NotAnInteger {
        /// Key of the label.
        key: String,
        /// Value of the label.
        value: String,
    },
    /// An operator that label selectors do not have.
    #[error("label {key}: unknown operator {operator:?}: use In, NotIn, Exists or DoesNotExist")]
    UnknownOperator {
        /// Key of the label.
        key: String,
        /// Operator of the requirement.
        operator: String,
    },
    /// A comparison, where the API takes the object form.
    #[error(
        "{requirement}: the object form of label selectors has no comparisons: use in (…), notin (…), a key, or !key"
    )]
    NoObjectForm {
        /// The requirement.
        requirement: String,
    },
}
