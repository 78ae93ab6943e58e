//! The rows of the table: what counts for each, its ceiling and its goal.

use std::collections::HashMap;
use std::fmt;

use crate::names::{Type, find_names};
use crate::source::{ProseKind, split_source};
use crate::text::{hash_comments, markdown_lines, words};

/// Words that the engineers of this field hardly use, their ceiling and their goal, each per 10,000 words of prose.
/// A ceiling is where the tree was last: a commit that lowers a rate lowers its ceiling, and none raises it.
const WORDS: [(&str, &[&str], f64, f64); 6] = [
    ("whoever/whatever", &["whoever", "whatever", "whomever"], 0.3, 1.5),
    ("nobody/somebody", &["nobody", "somebody"], 0.5, 1.0),
    ("told/tells/says", &["told", "tells", "says"], 2.6, 3.0),
    ("of which/of whom/whose", &["of which", "of whom", "whose"], 2.6, 4.0),
    ("is/are/has/have to be", &["is to be", "are to be", "has to be", "have to be"], 1.3, 7.0),
    ("anew/meanwhile", &["anew", "meanwhile"], 0.3, 1.0),
];

/// The other rows: name, ceiling, goal.
const OPENINGS: (&str, f64, f64) = ("module lines that open with a question", 0.0, 0.0);
const ONE_WORD: (&str, f64, f64) = ("function names of one word, %", 36.5, 40.0);
const SHARED: (&str, f64, f64) = ("types that share their name, %", 5.5, 15.0);
const MEDIAN: (&str, f64, f64) = ("words in a test name, median", 6.0, 7.0);
const NINETIETH: (&str, f64, f64) = ("words in a test name, 90th percentile", 8.0, 10.0);
const REASONS: (&str, f64, f64) = ("inline reasons in 100 lines of code", 1.2, 2.5);
const PARAMETERS: (&str, f64, f64) = ("functions with more than 5 parameters", 12.0, 12.0);

/// A shorter literal is a name or a fragment, no sentence.
const WORDS_OF_A_SENTENCE: usize = 4;
const MAX_PARAMETERS: usize = 5;
const QUESTIONS: [&str; 6] = ["who", "what", "which", "when", "where", "how"];

pub(crate) struct RateRow {
    pub(crate) name: &'static str,
    pub(crate) now: f64,
    pub(crate) ceiling: f64,
    pub(crate) goal: f64,
    pub(crate) found: Vec<SourcePlace>,
    /// Whether a line that a branch adds must not count here.
    pub(crate) offends_when_added: bool,
}

impl RateRow {
    pub(crate) fn is_beyond(&self, limit: f64) -> bool {
        if self.name == REASONS.0 { self.now < limit } else { self.now > limit }
    }
}

#[derive(Clone)]
pub(crate) struct SourcePlace {
    pub(crate) path: String,
    pub(crate) line: usize,
    text: String,
}

impl fmt::Display for SourcePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.text.trim())
    }
}

/// All that was read of the repository.
#[derive(Default)]
pub(crate) struct Tree {
    words: usize,
    listed: [Vec<SourcePlace>; WORDS.len()],
    openings: Vec<SourcePlace>,
    functions: usize,
    one_word: Vec<SourcePlace>,
    long: Vec<SourcePlace>,
    types: Vec<(SourcePlace, String)>,
    /// How many words each test's name has.
    tests: Vec<(usize, SourcePlace)>,
    code_lines: usize,
    reasons: Vec<SourcePlace>,
}

impl Tree {
    pub(crate) fn read_file(&mut self, path: &str, content: &str) {
        // English words are counted.
        if path.ends_with(".zh.md") || path.starts_with("docs/zh/") {
            return;
        }
        let name = path.rsplit('/').next().unwrap_or(path);
        match name.rsplit_once('.').map_or(name, |(_, extension)| extension) {
            "rs" => self.read_rust(path, content),
            "md" => self.count_words(path, &markdown_lines(content)),
            // Written by `make crds`, from comments that are counted already.
            "yaml" if name == "crds.yaml" || path.contains("/crds/") => {}
            "sh" | "yaml" | "toml" | "Makefile" | "run" => self.count_words(path, &hash_comments(content)),
            _ => {}
        }
    }

    fn read_rust(&mut self, path: &str, content: &str) {
        let source = split_source(content);
        let place =
            |line: usize, text: &str| SourcePlace { path: path.to_owned(), line, text: text.to_owned() };
        // A module of tests is the last of its file.
        let tests_begin = match content.find("#[cfg(test)]\nmod tests {") {
            _ if path.contains("tests/") || path.ends_with("tests.rs") => 0,
            Some(begin) => content[..begin].lines().count() + 1,
            None => usize::MAX,
        };
        let (mut comments, mut reason) = (Vec::new(), 0);
        for prose in &source.prose {
            let lines = prose.text.lines().enumerate().map(|(index, text)| (prose.line + index, text));
            if prose.kind != ProseKind::Literal {
                comments.extend(lines);
            } else if prose.line < tests_begin && words(&prose.text).len() >= WORDS_OF_A_SENTENCE {
                self.count_words(path, &lines.collect::<Vec<_>>());
            }
            // The lines of one comment give one reason.
            if prose.kind == ProseKind::Inline && prose.line < tests_begin {
                if prose.line != reason + 1 {
                    self.reasons.push(place(prose.line, &prose.text));
                }
                reason = prose.line;
            }
        }
        self.count_words(path, &comments);
        if let Some(first) = source.prose.first().filter(|first| first.kind == ProseKind::Module)
            && words(&first.text).first().is_some_and(|(word, _)| QUESTIONS.contains(&word.as_str()))
        {
            self.openings.push(place(first.line, &first.text));
        }
        self.code_lines +=
            source.code.lines().take(tests_begin).filter(|line| !line.trim().is_empty()).count();
        let (functions, types) = find_names(&source.code);
        for function in functions {
            let found = place(function.line, &function.name);
            if function.is_test {
                self.tests.push((function.name.split('_').count(), found));
                continue;
            }
            if function.parameters > MAX_PARAMETERS {
                self.long.push(found.clone());
            }
            if function.line < tests_begin {
                self.functions += 1;
                if !function.name.contains('_') {
                    self.one_word.push(found);
                }
            }
        }
        let types = types.into_iter().filter(|found| found.line < tests_begin);
        self.types.extend(types.map(|Type { line, name }| (place(line, &name), name)));
    }

    /// Looks for listed words in lines that follow each other; a phrase may go on in the next one.
    fn count_words(&mut self, path: &str, lines: &[(usize, &str)]) {
        let all: Vec<(String, bool, usize)> = lines
            .iter()
            .enumerate()
            .flat_map(|(index, (_, line))| {
                words(line).into_iter().map(move |(word, flows)| (word, flows, index))
            })
            .collect();
        self.words += all.len();
        for (begin, (_, _, index)) in all.iter().enumerate() {
            for (row, (_, phrases, ..)) in WORDS.iter().enumerate() {
                if phrases.iter().any(|phrase| begins_with(&all[begin..], phrase)) {
                    let (line, text) = lines[*index];
                    self.listed[row].push(SourcePlace { path: path.to_owned(), line, text: text.to_owned() });
                }
            }
        }
    }

    #[allow(clippy::cast_precision_loss)] // counts of words and lines
    pub(crate) fn measure(mut self) -> Vec<RateRow> {
        let share = |part: usize, whole: usize, of: f64| part as f64 * of / whole.max(1) as f64;
        let row = |(name, ceiling, goal), now, found, offends_when_added| RateRow {
            name,
            now,
            ceiling,
            goal,
            found,
            offends_when_added,
        };
        let mut rows: Vec<RateRow> = WORDS
            .iter()
            .zip(self.listed)
            .map(|((name, _, ceiling, goal), found)| {
                row((*name, *ceiling, *goal), share(found.len(), self.words, 1e4), found, true)
            })
            .collect();
        let mut uses: HashMap<&str, usize> = HashMap::new();
        for (_, name) in &self.types {
            *uses.entry(name).or_default() += 1;
        }
        let mut shared: Vec<_> = self.types.iter().filter(|(_, name)| uses[name.as_str()] > 1).collect();
        shared.sort_by_key(|(_, name)| name);
        let shared: Vec<SourcePlace> = shared.into_iter().map(|(place, _)| place.clone()).collect();
        self.tests.sort_by_key(|(words, _)| *words);
        let words_at = |share: usize| {
            self.tests.get(self.tests.len() * share / 100).map_or(0.0, |(words, _)| *words as f64)
        };
        let longer_than = |limit: f64| {
            self.tests
                .iter()
                .filter(|(words, _)| *words as f64 > limit)
                .map(|(_, place)| place.clone())
                .collect()
        };
        rows.extend([
            row(OPENINGS, self.openings.len() as f64, self.openings, true),
            row(ONE_WORD, share(self.one_word.len(), self.functions, 100.0), self.one_word, false),
            row(SHARED, share(shared.len(), self.types.len(), 100.0), shared, false),
            row(MEDIAN, words_at(50), longer_than(MEDIAN.2), false),
            row(NINETIETH, words_at(90), longer_than(NINETIETH.2), true),
            row(REASONS, share(self.reasons.len(), self.code_lines, 100.0), self.reasons, false),
            row(PARAMETERS, self.long.len() as f64, self.long, true),
        ]);
        rows
    }
}

fn begins_with(rest: &[(String, bool, usize)], phrase: &str) -> bool {
    let phrase: Vec<&str> = phrase.split(' ').collect();
    rest.len() >= phrase.len()
        && phrase
            .iter()
            .enumerate()
            .all(|(index, word)| rest[index].0 == *word && (rest[index].1 || index + 1 == phrase.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(path: &str, content: &str, name: &str) -> (f64, Vec<String>) {
        let mut tree = Tree::default();
        tree.read_file(path, content);
        let row = tree.measure().into_iter().find(|row| row.name.contains(name)).unwrap();
        (row.now, row.found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn phrases_go_on_over_line_ends() {
        let text = "// The one of\n// which we know, of. Which is not.\nfn a() {}\n";
        assert_eq!(measure("a.rs", text, "of which").1, ["a.rs:1: The one of"]);
    }

    #[test]
    fn literals_count_outside_of_tests() {
        let literal = "fn a() { b(\"nobody reads this here\") }\n";
        assert_eq!(measure("a.rs", literal, "nobody").1.len(), 1);
        assert_eq!(measure("tests/a.rs", literal, "nobody").1.len(), 0);
    }

    #[test]
    fn a_comment_is_one_reason() {
        let text = "fn a() {\n    // One\n    // reason.\n    b();\n    c(); // Another.\n}\n";
        let (now, found) = measure("a.rs", text, "reasons");
        assert_eq!(found, ["a.rs:2: One", "a.rs:5: Another."]);
        assert!((now - 50.0).abs() < 0.1, "{now}");
    }
}
