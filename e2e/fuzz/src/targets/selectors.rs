//! Label selectors: a selector on the first line, then labels `key=value`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use prepull_api::selector::Selector;

type InputLabels = BTreeMap<String, String>;

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (text, rest) = text.split_once('\n').unwrap_or((text, ""));
    let Ok(selector) = Selector::parse(text) else { return };
    let shown = selector.to_string();
    assert_eq!(Selector::parse(&shown).as_ref(), Ok(&selector), "{text} displays as {shown}");

    let labels: InputLabels =
        rest.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect();
    let requirements = parse_requirements(text);
    for labels in [&labels, &InputLabels::new()] {
        let expected = requirements.iter().all(|requirement| requirement.holds(labels));
        assert_eq!(selector.matches(labels), expected, "whether {text} selects {labels:?}");
    }
    if let Some(object) = selector_object(&requirements) {
        let converted = Selector::try_from(&object);
        let matches = converted.map(|converted| converted.matches(&labels));
        assert_eq!(matches, Ok(selector.matches(&labels)), "the object form of {text}");
    }
}

/// A requirement, read in the simplest way that works for a valid selector.
struct ParsedRequirement<'a> {
    key: &'a str,
    operator: &'a str,
    values: Vec<&'a str>,
}

impl ParsedRequirement<'_> {
    fn holds(&self, labels: &InputLabels) -> bool {
        let value = labels.get(self.key).map(String::as_str);
        let is_listed = value.is_some_and(|value| self.values.contains(&value));
        let numbers = || Some((value?.parse::<i64>().ok()?, self.values[0].parse::<i64>().ok()?));
        match self.operator {
            "exists" => value.is_some(),
            "!" => value.is_none(),
            "=" | "==" | "in" => is_listed,
            "!=" | "notin" => !is_listed,
            ">" => numbers().is_some_and(|(value, bound)| value > bound),
            _ => numbers().is_some_and(|(value, bound)| value < bound),
        }
    }
}

fn parse_requirements(text: &str) -> Vec<ParsedRequirement<'_>> {
    let is_blank = |c| matches!(c, ' ' | '\t' | '\r' | '\n');
    let mut depth = 0;
    let parts = text.split(move |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    });
    let mut found = Vec::new();
    for part in parts.map(|part| part.trim_matches(is_blank)).filter(|part| !part.is_empty()) {
        let list = |from: usize| {
            let inner = part[from..].trim_matches(|c| is_blank(c) || matches!(c, '(' | ')'));
            inner.split(',').map(|value| value.trim_matches(is_blank)).collect()
        };
        let end = part.find(|c| is_blank(c) || "=!<>(".contains(c)).unwrap_or(part.len());
        let (key, rest) = part.split_at(end);
        let rest_at = part.len() - rest.trim_start_matches(is_blank).len();
        let rest = &part[rest_at..];
        let value = |length: usize| vec![rest[length..].trim_matches(is_blank)];
        let (key, operator, values) = match rest {
            "" => (key, "exists", Vec::new()),
            _ if key.is_empty() => (part[1..].trim_matches(is_blank), "!", Vec::new()),
            _ if rest.starts_with("==") => (key, "==", value(2)),
            _ if rest.starts_with("!=") => (key, "!=", value(2)),
            _ if rest.starts_with(['=', '>', '<']) => (key, &rest[..1], value(1)),
            _ if rest.starts_with("in") => (key, "in", list(rest_at + 2)),
            _ => (key, "notin", list(rest_at + 5)),
        };
        found.push(ParsedRequirement { key, operator, values });
    }
    found
}

/// The same as an object of the API, which can't compare numbers.
fn selector_object(requirements: &[ParsedRequirement<'_>]) -> Option<LabelSelector> {
    let expressions = requirements.iter().map(|ParsedRequirement { key, operator, values }| {
        let operator = match *operator {
            "exists" => "Exists",
            "!" => "DoesNotExist",
            "=" | "==" | "in" => "In",
            "!=" | "notin" => "NotIn",
            _ => return None,
        };
        Some(LabelSelectorRequirement {
            key: (*key).to_owned(),
            operator: operator.to_owned(),
            values: Some(values.iter().map(|value| (*value).to_owned()).collect()),
        })
    });
    let match_expressions = Some(expressions.collect::<Option<_>>()?);
    Some(LabelSelector { match_expressions, match_labels: None })
}
