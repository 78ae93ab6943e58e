//! The manuals name only commands, flags, files and headings that there are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use prepull_e2e::parts::{self, workspace};
use prepull_e2e::prelude::*;

/// Names by which the manuals call our programs, and their files.
const PROGRAMS: [(&str, &str); 3] = [
    ("prepull", "kubectl-prepull"),
    ("cloudcore-prepull", "cloudcore-prepull"),
    ("edgecore-prepull", "edgecore-prepull"),
];

#[tokio::test]
async fn every_command_and_flag_exists() -> Result<()> {
    let (mut helps, mut wrong, mut seen) = (Helps::default(), Vec::new(), 0);
    for (file, text) in manuals()? {
        for (line, code) in code_of(&text) {
            for words in calls(code) {
                seen += 1;
                if let Some(why) = helps.lacks(&words).await? {
                    wrong.push(format!("{}:{line}: {why}", file.display()));
                }
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(seen > 100, "only {seen} commands were recognized");
    Ok(())
}

/// A span such as `nodes --outdated` or `tokens list`, without the plugin's name.
#[tokio::test]
async fn short_forms_of_plugin_commands_exist() -> Result<()> {
    let (mut helps, mut wrong, mut seen) = (Helps::default(), Vec::new(), 0);
    let root = helps.of(&["kubectl-prepull"]).await?;
    let pages = ["docs/kubectl-prepull.md", "docs/page.md", "docs/tasks.md", "docs/deltas.md", "docs/api.md"];
    for (file, text) in manuals()?.iter().filter(|(file, _)| pages.iter().any(|page| file.ends_with(page))) {
        for (line, code) in code_of(text) {
            let words: Vec<_> = code.split_whitespace().collect();
            let is_command = words.first().is_some_and(|first| has_command(&root, first));
            let parts = ["tokens", "node", "delta"];
            let says_more = words.iter().any(|word| word.starts_with("--"))
                || words.first().is_some_and(|first| parts.contains(first));
            if is_command && words.len() > 1 && says_more {
                seen += 1;
                let call: Vec<_> = std::iter::once("kubectl-prepull").chain(words).collect();
                wrong
                    .extend(helps.lacks(&call).await?.map(|why| format!("{}:{line}: {why}", file.display())));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(seen > 10, "only {seen} commands were recognized");
    Ok(())
}

#[test]
fn manuals_keep_to_the_glossary() -> Result<()> {
    let manuals = manuals()?;
    let glossary = Path::new("docs/glossary.md");
    let text = manuals.get(glossary).context("no glossary")?;
    let others = || manuals.iter().filter(|(file, _)| file.as_path() != glossary && file.starts_with("docs"));
    let mut wrong = Vec::new();
    let terms = text.lines().filter_map(|line| line.strip_prefix("| **")?.split("**").next());
    for term in terms {
        // Also as the name of a type or of a field.
        let pattern = term.replace(' ', "[ _-]?");
        let paths = ["*.rs", "docs/*.md", ":!docs/glossary.md"];
        let mut search = Command::new("git");
        search.args(["grep", "-iqE", &pattern, "--"]).args(paths);
        if !search.current_dir(workspace()).status()?.success() {
            wrong.push(format!("{}: {term} is used nowhere", glossary.display()));
        }
    }
    let (_, unwanted) = text.split_once("| not | but |").context("no table of unwanted words")?;
    let rows = unwanted.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let unwanted: Vec<_> = rows.flat_map(|words| words.split(", ")).collect();
    ensure!(unwanted.len() > 10, "{unwanted:?}");
    for (file, text) in others() {
        for line in prose(text) {
            // A word in code is a name of the API, of a flag or of a metric.
            let said = line.split('`').step_by(2).collect::<Vec<_>>().join(" ").to_lowercase();
            let words: Vec<_> = said.split(|c: char| !c.is_alphanumeric() && c != '-').collect();
            let said = format!(" {} ", words.join(" "));
            let found = unwanted.iter().filter(|word| said.contains(&format!(" {word} ")));
            wrong.extend(found.map(|word| format!("{}: {word}: {line}", file.display())));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn every_link_leads_somewhere() -> Result<()> {
    let manuals = manuals()?;
    let mut wrong = Vec::new();
    for (file, text) in &manuals {
        let dir = file.parent().context("a file without a directory")?;
        for link in links(text).filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { file.clone() } else { normalized(&dir.join(path)) };
            if !workspace().join(&target).exists() {
                wrong.push(format!("{}: no file {link}", file.display()));
            } else if let Some(text) = manuals.get(&target).filter(|_| !heading.is_empty())
                && !headings(text).contains(heading)
            {
                wrong.push(format!("{}: no heading {link}", file.display()));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The texts of all Markdown files that git knows, by their paths in the workspace.
fn manuals() -> Result<BTreeMap<PathBuf, String>> {
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(workspace()).output()?;
    let files = String::from_utf8(listed.stdout)?;
    let read = |file: &str| Ok((file.into(), std::fs::read_to_string(workspace().join(file))?));
    files.lines().map(read).collect()
}

/// The lines of code blocks and the code spans, each with its line number.
fn code_of(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_block = false;
    text.lines().zip(1..).flat_map(move |(line, number)| {
        let is_fence = line.trim_start().starts_with("```");
        is_block ^= is_fence;
        let code: Vec<_> = match (is_fence, is_block) {
            (true, _) => Vec::new(),
            (false, true) => vec![line],
            (false, false) => line.split('`').skip(1).step_by(2).collect(),
        };
        code.into_iter().map(move |code| (number, code))
    })
}

/// The calls of our programs in a piece of code, each as words from the program's file on.
fn calls(code: &str) -> Vec<Vec<&str>> {
    let words: Vec<_> = code.split_whitespace().map(|word| word.trim_matches('\'')).collect();
    let begins = |at: usize| {
        let before = at.checked_sub(1).map(|before| words[before]);
        let is_plugin = words[at] == "prepull" && before == Some("kubectl");
        // At a prompt, after environment variables, or in another command: `kubectl exec … -- cloudcore-prepull …`.
        let is_command =
            before.is_none_or(|word| ["$", "#", "--", "sudo"].contains(&word) || word.contains('='));
        let name = words[at].trim_start_matches("./");
        PROGRAMS
            .iter()
            .find(|(called, _)| name == *called && (is_plugin || (is_command && name != "prepull")))
            .map(|(_, program)| *program)
    };
    // The name of another program is a picture's.
    let is_part = |word: &&&str| {
        !["|", "||", "&&", ";", ">", "#", "\\", "…"].contains(*word)
            && !PROGRAMS.iter().any(|(_, name)| name == *word)
    };
    let call = |(at, program)| {
        std::iter::once(program).chain(words[at + 1..].iter().take_while(is_part).copied()).collect()
    };
    (0..words.len()).filter_map(|at| Some((at, begins(at)?))).map(call).collect()
}

/// The helps of commands that were asked for.
#[derive(Default)]
struct Helps(HashMap<Vec<String>, String>);

impl Helps {
    async fn of(&mut self, command: &[&str]) -> Result<String> {
        let key: Vec<_> = command.iter().map(|&word| word.to_owned()).collect();
        if let Some(help) = self.0.get(&key) {
            return Ok(help.clone());
        }
        let mut process = Command::new(parts::program_path(command[0])?);
        process.args(&command[1..]).arg("--help");
        let help = parts::run_command(process).await?;
        self.0.insert(key, help.clone());
        Ok(help)
    }

    /// The command or flag of a call that doesn't exist.
    async fn lacks(&mut self, call: &[&str]) -> Result<Option<String>> {
        let mut command = 1;
        let mut help = self.of(&call[..1]).await?;
        while let Some(word) = call.get(command).filter(|word| has_command(&help, word)) {
            command += 1;
            help = self.of(&call[..command]).await.with_context(|| format!("the help of {word}"))?;
        }
        let is_word = |word: &&&str| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        if let Some(word) = call.get(command).filter(|word| !word.starts_with('-')).filter(is_word)
            && help.contains("\nCommands:")
        {
            return Ok(Some(format!("`{}` has no command {word}", call[..command].join(" "))));
        }
        let flags = call[command..].iter().take_while(|word| **word != "--");
        let flags = flags.filter_map(|word| word.strip_prefix("--")).map(|flag| {
            flag.split(|byte: char| !(byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == '-'))
                .next()
        });
        let missing = flags.flatten().find(|flag| *flag != "help" && !help.contains(&format!("--{flag}")));
        Ok(missing.map(|flag| format!("`{}` has no --{flag}", call[..command].join(" "))))
    }
}

fn has_command(help: &str, name: &str) -> bool {
    let listed = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let mut lines = listed.lines().take_while(|line| !line.is_empty());
    lines.any(|line| line.strip_prefix("  ").and_then(|line| line.split(' ').next()) == Some(name))
}

/// The targets of the links outside of code blocks.
fn links(text: &str) -> impl Iterator<Item = &str> {
    prose(text).flat_map(|line| {
        line.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|link| !link.contains(' '))
    })
}

/// The anchors of a page: its headings as they appear in links, and those that it names itself.
fn headings(text: &str) -> BTreeSet<String> {
    let own =
        prose(text).flat_map(|line| line.split("<a id=\"").skip(1)).filter_map(|id| id.split('"').next());
    let headings = prose(text).filter(|line| line.starts_with('#')).map(|line| {
        let kept = line.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|char| char.is_alphanumeric() || "-_ ".contains(*char));
        kept.map(|char| if char == ' ' { '-' } else { char }).collect()
    });
    headings.chain(own.map(str::to_owned)).collect()
}

/// The lines that are no code block.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_block = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_block ^= is_fence;
        !is_block && !is_fence
    })
}

/// The path without `.` and `..`.
fn normalized(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, part| {
        if part.as_os_str() == ".." {
            path.pop();
        } else if part.as_os_str() != "." {
            path.push(part);
        }
        path
    })
}
