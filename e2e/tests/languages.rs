//! The pages in Chinese have the commands, fields and links of the pages in English.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;

/// Pages that have everything of their original below `docs`.
const WHOLE: [&str; 3] = ["api.md", "kubeedge.md", "kruise.md"];
/// Pages that are arranged otherwise, of the same commands and manifests.
const ARRANGED: ([&str; 2], [&str; 2]) =
    (["README.md", "docs/quickstart.md"], ["README.zh.md", "docs/zh/first-job.md"]);
/// How each page begins the name of its original.
const ORIGINAL: &str = "译自 2";

fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(workspace().join(file)).with_context(|| file.to_owned())
}

/// The lines of the code blocks in these languages, without comments, which are translated.
fn code<'a>(text: &'a str, languages: &[&str]) -> Vec<&'a str> {
    let mut language = None;
    let mut lines = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.trim_start().strip_prefix("```") {
            language = language.is_none().then_some(name);
        } else if language.is_some_and(|language| languages.contains(&language)) {
            let is_comment = language == Some("yaml") && line.trim_start().starts_with('#');
            let kept = line.split("  #").next().unwrap_or(line).trim_end();
            if !is_comment && !kept.is_empty() {
                lines.push(kept);
            }
        }
    }
    lines
}

/// The commands among the lines of code, with those that continue them.
fn commands<'a>(text: &'a str) -> BTreeSet<&'a str> {
    let mut continues = false;
    let is_command = |line: &&'a str| {
        let is = continues || line.starts_with("$ ") || line.starts_with("# ");
        continues = is && line.ends_with('\\');
        is
    };
    code(text, &["console"]).into_iter().filter(is_command).collect()
}

/// The code in the first column of all tables.
fn fields(text: &str) -> Vec<&str> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

/// The targets of the relative links of a page, those to pages in Chinese as to their originals.
fn targets(file: &str, text: &str) -> BTreeSet<PathBuf> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let links = links.filter(|link| !link.contains("://") && !link.contains(' '));
    let dir = Path::new(file).parent().unwrap_or(Path::new(""));
    let dir = if dir.ends_with("zh") { dir } else { &dir.join("zh") };
    let own = file.rsplit('/').next().unwrap_or(file);
    let target = |link: &str| {
        let in_english = !file.contains("/zh/") && !link.starts_with('#');
        let path = if link.starts_with('#') { format!("{own}{link}") } else { link.to_owned() };
        let path = if in_english { format!("../{path}") } else { path };
        let mut target = PathBuf::new();
        for part in dir.join(path).components() {
            if part.as_os_str() == ".." { _ = target.pop() } else { target.push(part) }
        }
        let below = target.strip_prefix("docs/zh").map(|below| Path::new("docs").join(below));
        below.unwrap_or(target)
    };
    // The pages name each other.
    let page = Path::new("docs").join(own);
    links.map(target).filter(|target| *target != page).collect()
}

#[test]
fn pages_in_chinese_follow_the_english_ones() -> Result<()> {
    for name in WHOLE {
        let (english, chinese) = (format!("docs/{name}"), format!("docs/zh/{name}"));
        let (before, after) = (read(&english)?, read(&chinese)?);
        let languages = ["console", "yaml"];
        assert_eq!(code(&before, &languages), code(&after, &languages), "{chinese}");
        assert_eq!(fields(&before), fields(&after), "{chinese}");
        assert_eq!(targets(&english, &before), targets(&chinese, &after), "{chinese}");
        ensure!(after.contains(ORIGINAL) && before.contains(&format!("(zh/{name})")), "{chinese}");
    }
    let joined = |files: [&str; 2]| Ok::<_, anyhow::Error>(read(files[0])? + &read(files[1])?);
    let (before, after) = (joined(ARRANGED.0)?, joined(ARRANGED.1)?);
    assert_eq!(commands(&before), commands(&after));
    assert_eq!(code(&before, &["yaml"]), code(&after, &["yaml"]));
    ensure!(after.matches(ORIGINAL).count() == 2, "{:?} name no original", ARRANGED.1);
    Ok(())
}
