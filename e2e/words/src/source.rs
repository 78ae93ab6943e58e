//! Splits Rust source into comments, string literals and code.

/// A run of prose and the line that it begins at.
pub(crate) struct Prose {
    pub(crate) line: usize,
    pub(crate) text: String,
    pub(crate) kind: ProseKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProseKind {
    /// `//!`
    Module,
    /// `///`
    Doc,
    /// `//` on a line of its own, or after code.
    Inline,
    /// A string literal.
    Literal,
}

#[derive(Default)]
pub(crate) struct SplitSource {
    pub(crate) prose: Vec<Prose>,
    /// The source with comments and the content of literals left out. Line ends stay.
    pub(crate) code: String,
}

pub(crate) fn split_source(content: &str) -> SplitSource {
    let mut source = SplitSource::default();
    let chars: Vec<char> = content.chars().collect();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let rest = &chars[at..];
        let after_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
        let (length, prose) = if rest.starts_with(&['/', '/']) {
            let length = length_until(rest, "\n");
            (length, Some(read_comment(&rest[..length])))
        } else if rest.starts_with(&['/', '*']) {
            (length_until(rest, "*/") + 2, None)
        } else if let Some((length, text)) = read_string(rest).filter(|_| rest[0] == '"' || !after_word) {
            source.code.push('"');
            (length, Some((ProseKind::Literal, text)))
        } else if rest[0] == '\'' {
            source.code.push('\'');
            (length_of_quote(rest), None)
        } else {
            source.code.push(rest[0]);
            line += usize::from(rest[0] == '\n');
            at += 1;
            continue;
        };
        if let Some((kind, text)) = prose {
            source.prose.push(Prose { line, text, kind });
        }
        let length = length.min(rest.len());
        let ends = rest[..length].iter().filter(|char| **char == '\n').count();
        source.code.extend(std::iter::repeat_n('\n', ends));
        line += ends;
        at += length;
    }
    source
}

fn read_comment(comment: &[char]) -> (ProseKind, String) {
    let kind = match comment.get(2) {
        Some('!') => ProseKind::Module,
        Some('/') => ProseKind::Doc,
        _ => ProseKind::Inline,
    };
    (kind, comment.iter().skip(2).skip_while(|char| matches!(char, '/' | '!')).collect())
}

/// The length of a string literal and its text: `"…"`, `b"…"`, `r#"…"#`.
fn read_string(rest: &[char]) -> Option<(usize, String)> {
    let prefix = rest.iter().take_while(|char| matches!(char, 'b' | 'r' | 'c')).count();
    let raw = rest[..prefix].contains(&'r');
    let hashes = if raw { rest[prefix..].iter().take_while(|char| **char == '#').count() } else { 0 };
    let begin = prefix + hashes + 1;
    if prefix > 2 || rest.get(begin - 1) != Some(&'"') {
        return None;
    }
    let mut end = begin;
    while end < rest.len() {
        if !raw && rest[end] == '\\' {
            end += 2;
        } else if rest[end] == '"'
            && rest[end + 1..].iter().take(hashes).filter(|char| **char == '#').count() == hashes
        {
            break;
        } else {
            end += 1;
        }
    }
    let end = end.min(rest.len());
    Some((end + 1 + hashes, rest[begin..end].iter().collect::<String>().replace("\\n", " ")))
}

/// One for a lifetime; the whole literal for a character.
fn length_of_quote(rest: &[char]) -> usize {
    match rest {
        ['\'', '\\', _, tail @ ..] => 4 + length_until(tail, "'"),
        ['\'', _, '\'', ..] => 3,
        _ => 1,
    }
}

fn length_until(rest: &[char], end: &str) -> usize {
    let end: Vec<char> = end.chars().collect();
    rest.windows(end.len()).position(|window| window == end).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_comments_strings_and_code() {
        let source = split_source(
            "//! A b.\nfn a<'a>(b: &'a str) { // why\n  x('\"', '\\'', r#\"c \"d\"\"#, \"e\\\"\nf\");\n}\n/// D.\n",
        );
        let prose: Vec<_> =
            source.prose.iter().map(|prose| (prose.line, prose.kind, prose.text.as_str())).collect();
        assert_eq!(
            prose,
            [
                (1, ProseKind::Module, " A b."),
                (2, ProseKind::Inline, " why"),
                (3, ProseKind::Literal, "c \"d\""),
                (3, ProseKind::Literal, "e\\\"\nf"),
                (6, ProseKind::Doc, " D."),
            ]
        );
        assert_eq!(source.code, "\nfn a<'a>(b: &'a str) { \n  x(', ', \", \"\n);\n}\n\n");
    }
}
