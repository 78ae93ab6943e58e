//! Mutations that know lines and JSON: a flipped byte in a bracket or a field's name would only produce another text
//! that's rejected immediately.

use serde_json::Value;

use crate::InputForm;
use rng::Rng;

#[path = "../../../cloudcore-prepull/engine/src/shared/rng.rs"]
#[allow(clippy::unwrap_used, reason = "the remainder of a usize is one")]
mod rng;

/// Texts with a meaning in some format.
const TEXTS: &[&str] = &[
    "",
    "a",
    "A",
    "-",
    "_",
    ".",
    "..",
    "/",
    ":",
    "@",
    "*",
    "\\",
    "\"",
    "\u{0}",
    "\u{1}",
    "\u{7f}",
    "é",
    "\u{202e}",
    "😀",
    "0",
    "-1",
    "latest",
    "localhost",
    "r.io",
    "r.io:5000",
    "[::1]:5000",
    "https://index.docker.io/v1/",
    "docker.io",
    "library/nginx",
    "nginx:1.25",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "default/secret",
    "edge-000000",
    "edge-000001",
    "all",
    "kruise",
    "ni-edge-000000.",
    "50%",
    "0.5",
    "5m",
    "1h30m",
    "2026-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "-009999-01-02T01:59:59Z",
];
const NUMBERS: &[i64] = &[
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    65,
    200,
    255,
    256,
    257,
    1023,
    1024,
    65_536,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 32,
    1 << 53,
    i64::MAX,
    i64::MIN,
    253_402_300_799_000,
];

/// Changes an input and keeps its form. `None` if it doesn't have that form.
pub fn mutate(form: InputForm, input: &[u8], seed: u32) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(input).ok()?;
    let mut rng = Rng::new(seed.into());
    match form {
        InputForm::Lines => Some(change_lines(text, &mut rng, |_, _| None).into_bytes()),
        InputForm::Json => change_json(text, &mut rng).map(String::into_bytes),
        InputForm::JsonLines => Some(change_lines(text, &mut rng, change_json).into_bytes()),
    }
}

/// Removes, repeats, moves or changes lines.
fn change_lines(text: &str, rng: &mut Rng, change: fn(&str, &mut Rng) -> Option<String>) -> String {
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let (at, other) = (rng.below(lines.len()), rng.below(lines.len()));
    match rng.below(8) {
        0 => {
            lines.remove(at);
        }
        1 => lines.insert(other, lines[at].clone()),
        2 => lines.swap(at, other),
        3 => lines[at] = splice(&lines[at], &lines[other], rng),
        _ => match change(&lines[at], rng) {
            Some(changed) => lines[at] = changed,
            None => lines[at] = change_text(&lines[at], rng),
        },
    }
    lines.join("\n")
}

/// The beginning of one text and the end of another.
fn splice(one: &str, other: &str, rng: &mut Rng) -> String {
    let cut = |text: &str, rng: &mut Rng| {
        (0..=rng.below(text.len() + 1)).rev().find(|at| text.is_char_boundary(*at))
    };
    let (end, start) = (cut(one, rng).unwrap_or(0), cut(other, rng).unwrap_or(0));
    format!("{}{}", &one[..end], &other[start..])
}

fn change_text(text: &str, rng: &mut Rng) -> String {
    let added = rng.pick(TEXTS);
    match rng.below(8) {
        0 => added.to_owned(),
        1 => format!("{text}{added}"),
        2 => format!("{added}{text}"),
        3 => splice(text, "", rng),
        4 => splice(text, text, rng),
        // As long as a limit, or longer.
        5 => added.repeat(rng.pick(&[63, 64, 128, 253, 256, 1024, 2048])),
        _ => {
            let middle = splice(text, added, rng);
            splice(&middle, text, rng)
        }
    }
}

fn change_json(text: &str, rng: &mut Rng) -> Option<String> {
    let mut value: Value = serde_json::from_str(text).ok()?;
    let other = value.clone();
    for _ in 0..=rng.below(3) {
        let at = rng.below(count_values(&value));
        let from = rng.below(count_values(&other));
        let other = nth_value(&mut other.clone(), from).map(|part| part.clone());
        if let Some(part) = nth_value(&mut value, at) {
            change_value(part, other, rng);
        }
    }
    serde_json::to_string(&value).ok()
}

fn change_value(value: &mut Value, other: Option<Value>, rng: &mut Rng) {
    match (rng.below(8), value) {
        (0, value) => *value = other.unwrap_or_default(),
        (1, value) => {
            *value = if rng.chance(90) { rng.pick(NUMBERS).into() } else { u64::MAX.into() };
        }
        (2, value) => {
            *value = match rng.below(4) {
                0 => Value::Null,
                1 => true.into(),
                2 => Value::Array(Vec::new()),
                _ => Value::Object(serde_json::Map::new()),
            }
        }
        (_, Value::String(text)) => *text = change_text(text, rng),
        (_, Value::Number(number)) => {
            let (near, far) = (number.as_i64().unwrap_or(0), rng.pick(NUMBERS));
            *number =
                rng.pick(&[near.wrapping_add(1), near.wrapping_sub(1), near.wrapping_neg(), far]).into();
        }
        (_, Value::Array(values)) => {
            let at = rng.below(values.len());
            match (rng.below(4), values.get(at).cloned().or(other)) {
                (0, _) if !values.is_empty() => {
                    values.remove(at);
                }
                (1, Some(value)) => {
                    values.extend(std::iter::repeat_n(value, rng.pick(&[1, 2, 10, 100, 256])));
                }
                (_, Some(value)) => values.insert(at, value),
                (_, None) => {}
            }
        }
        (_, Value::Object(fields)) => {
            let names: Vec<String> = fields.keys().cloned().collect();
            let Some(name) = rng.choose(&names) else { return };
            match rng.below(3) {
                0 => {
                    fields.remove(name);
                }
                1 => {
                    let value = fields.remove(name).unwrap_or_default();
                    fields.insert(change_text(name, rng), value);
                }
                _ => {
                    let value = fields.get(name).cloned().unwrap_or_default();
                    fields.insert(change_text(name, rng), value);
                }
            }
        }
        (_, value) => *value = rng.pick(TEXTS).into(),
    }
}

/// Number of values, including nested ones.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(count_values).sum(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// The n-th of them.
fn nth_value(value: &mut Value, n: usize) -> Option<&mut Value> {
    fn find<'a>(value: &'a mut Value, n: &mut usize) -> Option<&'a mut Value> {
        if *n == 0 {
            return Some(value);
        }
        *n -= 1;
        match value {
            Value::Array(values) => values.iter_mut().find_map(|value| find(value, n)),
            Value::Object(fields) => fields.values_mut().find_map(|value| find(value, n)),
            _ => None,
        }
    }
    find(value, &mut { n })
}
