//! Finds the functions, types and tests that a Rust file names.

/// A function of our own naming; methods of a trait's implementation aren't.
pub(crate) struct Function {
    pub(crate) line: usize,
    pub(crate) name: String,
    pub(crate) parameters: usize,
    pub(crate) is_test: bool,
}

pub(crate) struct Type {
    pub(crate) line: usize,
    pub(crate) name: String,
}

/// Code as `split_source` leaves it, laid out by rustfmt.
pub(crate) fn find_names(code: &str) -> (Vec<Function>, Vec<Type>) {
    let (mut functions, mut types) = (Vec::new(), Vec::new());
    let (mut of_a_trait, mut is_test) = (false, false);
    let mut begin = 0;
    for (index, text) in code.lines().enumerate() {
        let line = index + 1;
        let rest = &code[begin..];
        begin += text.len() + 1;
        if text.starts_with("impl") {
            of_a_trait = text.contains(" for ");
        } else if text.starts_with('}') {
            of_a_trait = false;
        }
        let item = text.trim_start();
        if item.starts_with("#[test]") || item.starts_with("#[tokio::test") {
            is_test = true;
        }
        let words: Vec<&str> = item.split_inclusive(|char: char| !is_name(char)).map(str::trim_end).collect();
        let Some(keyword) = words.iter().position(|word| !is_modifier(word)) else { continue };
        let Some(name) = words.get(keyword + 1).map(|word| word.trim_end_matches(|char| !is_name(char)))
        else {
            continue;
        };
        match words[keyword] {
            "fn" if !of_a_trait => {
                let parameters =
                    count_parameters(rest.split_once("fn ").map_or("", |(_, rest)| &rest[name.len()..]));
                functions.push(Function { line, name: name.to_owned(), parameters, is_test });
                is_test = false;
            }
            "struct" | "enum" | "trait" | "type" if !of_a_trait && !name.is_empty() => {
                types.push(Type { line, name: name.to_owned() });
            }
            _ => {}
        }
    }
    (functions, types)
}

fn is_name(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

fn is_modifier(word: &str) -> bool {
    matches!(
        word,
        "pub"
            | "pub("
            | "crate"
            | "crate)"
            | "super)"
            | "const"
            | "async"
            | ""
            | ")"
            | "in"
            | "unsafe"
            | "extern"
            | "\""
    )
}

/// The parameters in the first list behind a function's name, `self` among them.
fn count_parameters(rest: &str) -> usize {
    let (mut depth, mut angle, mut count, mut filled) = (0_usize, 0_usize, 0, false);
    let mut before = ' ';
    for char in rest.chars() {
        match char {
            '<' => angle += 1,
            '>' if before != '-' && before != '=' => angle = angle.saturating_sub(1),
            '(' | '[' | '{' => {
                depth += 1;
                if depth == 1 && angle == 0 {
                    before = char;
                    continue;
                }
            }
            ')' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && angle == 0 {
                    return count + usize::from(filled);
                }
            }
            ',' if depth == 1 && angle == 0 => {
                count += 1;
                filled = false;
                before = char;
                continue;
            }
            _ => {}
        }
        filled |= depth > 0 && angle == 0 && !char.is_whitespace();
        before = char;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_parameters_between_generics() {
        assert_eq!(count_parameters("<F: Fn(u8, u8) -> u8>(\n  a: F,\n  b: Vec<(u8, u8)>,\n) {"), 2);
        assert_eq!(count_parameters("() -> u8 {"), 0);
        assert_eq!(count_parameters("(&self, a: HashMap<u8, u8>) -> u8 {"), 2);
    }

    #[test]
    fn finds_functions_tests_and_types() {
        let code = "pub(crate) struct A;\nimpl B for A {\n    fn b() {}\n    type C = u8;\n}\n#[tokio::test]\nasync fn d_e() {}\npub(super) const fn f() {}\npub enum G<H> {}\n";
        let (functions, types) = find_names(code);
        let functions: Vec<_> = functions
            .iter()
            .map(|function| (function.line, function.name.as_str(), function.is_test))
            .collect();
        assert_eq!(functions, [(7, "d_e", true), (8, "f", false)]);
        let types: Vec<_> = types.iter().map(|found| (found.line, found.name.as_str())).collect();
        assert_eq!(types, [(1, "A"), (9, "G")]);
    }
}
