//! Takes the prose out of Markdown and of files whose comments begin with `#`.

/// The lines of a Markdown file outside of fenced blocks, numbered from 1.
pub(crate) fn markdown_lines(content: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    numbered_lines(content)
        .filter(|(_, line)| {
            let fence = line.trim_start().starts_with("```");
            fenced ^= fence;
            !fenced && !fence
        })
        .collect()
}

/// The comments of a shell script, a Makefile, YAML or TOML.
pub(crate) fn hash_comments(content: &str) -> Vec<(usize, &str)> {
    numbered_lines(content)
        .filter_map(|(number, line)| {
            let comment =
                line.strip_prefix("# ").or_else(|| line.split_once(" # ").map(|(_, comment)| comment));
            comment.or_else(|| line.split_once(" ## ").map(|(_, help)| help)).map(|comment| (number, comment))
        })
        .collect()
}

fn numbered_lines(content: &str) -> impl Iterator<Item = (usize, &str)> {
    content.lines().enumerate().map(|(index, line)| (index + 1, line))
}

/// The words of a line in lower case, each with whether a phrase may go on behind it. Code in backticks is no word.
pub(crate) fn words(line: &str) -> Vec<(String, bool)> {
    let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ` ");
    let mut words: Vec<(String, bool)> = Vec::new();
    for token in prose.split_whitespace() {
        let word = token.trim_matches(|char: char| !char.is_alphanumeric());
        if word.contains(|char: char| char.is_alphabetic()) && !word.contains(['/', '=', '(', '_']) {
            words.push((word.to_lowercase(), token.ends_with(|char: char| char.is_alphanumeric())));
        } else if let Some((_, flows)) = words.last_mut() {
            *flows = false;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fenced_blocks_and_code_hold_no_words() {
        let lines = markdown_lines("One `two` three, four.\n```\nfive\n```\nsix");
        let words: Vec<_> = lines.iter().flat_map(|(_, line)| words(line)).collect();
        let flows = |word: &str, flows| (word.to_owned(), flows);
        assert_eq!(
            words,
            [flows("one", false), flows("three", false), flows("four", false), flows("six", true)]
        );
    }

    #[test]
    fn comments_stand_behind_a_hash() {
        assert_eq!(hash_comments("# a\nb # c\nd: ## e\n${#f}"), [(1, "a"), (2, "c"), (3, "e")]);
    }
}
