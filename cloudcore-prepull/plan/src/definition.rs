//! A job from a file, checked against its definition as a strict API server checks it: unknown fields and values of the
//! wrong type are named. serde alone would ignore the former, and say of the latter only what is wrong and not where.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use serde_json::Value;

/// The most problems that are listed. With more the file is probably no job at all.
const LISTED: usize = 10;

/// What is wrong with an object, one line for each problem. Removes null where a field may be absent, as an API server
/// does before it validates.
pub(super) fn check(object: &mut Value, schema: &JSONSchemaProps) -> Result<(), String> {
    let mut check = Check { root: schema, problems: Vec::new() };
    check.value(object, schema, "");
    let Check { root: _, mut problems } = check;
    let more = problems.len().saturating_sub(LISTED);
    problems.truncate(LISTED);
    if more > 0 {
        problems.push(format!("{more} more problems"));
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n  ")) }
}

struct Check<'a> {
    root: &'a JSONSchemaProps,
    problems: Vec<String>,
}

impl Check<'_> {
    fn value(&mut self, value: &mut Value, schema: &JSONSchemaProps, path: &str) {
        if schema.x_kubernetes_int_or_string == Some(true) {
            return;
        }
        match (schema.type_.as_deref(), value) {
            (Some("object"), Value::Object(object)) => self.object(object, schema, path),
            (Some("array"), Value::Array(items)) => {
                let Some(JSONSchemaPropsOrArray::Schema(of_items)) = &schema.items else { return };
                for (index, item) in items.iter_mut().enumerate() {
                    self.value(item, of_items, &format!("{path}[{index}]"));
                }
            }
            (None, _)
            | (Some("string"), Value::String(_))
            | (Some("boolean"), Value::Bool(_))
            | (Some("number"), Value::Number(_)) => {}
            (Some("integer"), Value::Number(number)) if number.is_i64() => {}
            (Some(expected), found) => {
                let problem = wrong_type(path, expected, found);
                self.problems
                    .push(format!("{}: {problem}", if path.is_empty() { "the object" } else { path }));
            }
        }
    }

    fn object(&mut self, object: &mut serde_json::Map<String, Value>, schema: &JSONSchemaProps, path: &str) {
        let join = |field: &str| if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        if let Some(JSONSchemaPropsOrBool::Schema(of_values)) = &schema.additional_properties {
            object.iter_mut().for_each(|(key, value)| self.value(value, of_values, &join(key)));
        }
        let Some(fields) = &schema.properties else { return };
        object.retain(|field, value| !(value.is_null() && fields.contains_key(field)));
        for (field, value) in object.iter_mut() {
            match fields.get(field) {
                Some(of_field) => self.value(value, of_field, &join(field)),
                None => self.problems.push(self.unknown_field(path, field, fields.keys())),
            }
        }
        for missing in schema.required.iter().flatten().filter(|field| !object.contains_key(*field)) {
            self.problems.push(format!("{}: required, and not there", join(missing)));
        }
    }

    /// Names the field that was probably meant: one with a similar name in the same place, or one of this name elsewhere.
    fn unknown_field<'f>(&self, path: &str, field: &str, known: impl Iterator<Item = &'f String>) -> String {
        let place = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        let distance =
            |name: &&String| strsim::damerau_levenshtein(&name.to_lowercase(), &field.to_lowercase());
        let limit = (field.chars().count() / 3).max(1);
        if let Some(similar) = known.min_by_key(distance).filter(|name| distance(name) <= limit) {
            return format!("{place}: unknown field: did you mean {similar}?");
        }
        match home_of(field, self.root, "") {
            Some(home) => format!("{place}: unknown field: {field} is a field of {home}"),
            None => format!("{place}: unknown field"),
        }
    }
}

/// The first place, depth first, where a field of this name belongs.
fn home_of(field: &str, schema: &JSONSchemaProps, path: &str) -> Option<String> {
    let fields = schema.properties.as_ref();
    if !path.is_empty() && fields.is_some_and(|fields| fields.contains_key(field)) {
        return Some(path.to_owned());
    }
    let below = fields.into_iter().flatten().find_map(|(name, of_name)| {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        home_of(field, of_name, &path)
    });
    below.or_else(|| match &schema.items {
        Some(JSONSchemaPropsOrArray::Schema(of_items)) => home_of(field, of_items, &format!("{path}[]")),
        _ => None,
    })
}

fn wrong_type(path: &str, expected: &str, found: &Value) -> String {
    let is_text = matches!(found, Value::String(_));
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the text {:?}", shortened(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    match expected {
        "string" if matches!(found.as_str(), "a list" | "an object" | "null") => {
            format!("a text is expected, and not {found}")
        }
        "string" => format!("a text is expected, and not {found}: quote it"),
        "integer" if is_text && path.ends_with("Seconds") => {
            format!(
                "seconds are expected, as a whole number without quotes and without a unit, and not {found}"
            )
        }
        "integer" => format!("a whole number without quotes is expected, and not {found}"),
        "boolean" => format!("true or false is expected, without quotes, and not {found}"),
        "array" => format!("a list is expected, and not {found}"),
        "object" => format!("an object with named fields is expected, and not {found}"),
        other => format!("a value of type {other} is expected, and not {found}"),
    }
}

fn shortened(text: &str) -> String {
    const CHARS: usize = 40;
    match text.char_indices().nth(CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
