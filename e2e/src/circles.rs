//! Modules that need each other, over all crates: a circle can only be read, moved and tested as a whole.
//!
//! A module needs a sibling if any file below it has a path into that sibling. Parents and children aren't compared, nor
//! are tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Module = Vec<String>;

#[test]
fn no_module_needs_itself_through_another() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let found: Vec<String> = crates(workspace).iter().flat_map(|root| circles(workspace, root)).collect();
    assert!(found.is_empty(), "as `crate: parent: modules`: {found:#?}");
}

/// The `src` folders of the workspace.
fn crates(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let folders = entries.filter(|path| {
        path.is_dir()
            && !path.ends_with("target")
            && !path.file_name().unwrap().as_encoded_bytes().starts_with(b".")
    });
    let below = folders.flat_map(|folder| {
        let src = folder.join("src");
        let own = src.join("lib.rs").exists().then_some(src);
        own.into_iter().chain(crates(&folder)).collect::<Vec<_>>()
    });
    below.collect()
}

fn circles(workspace: &Path, root: &Path) -> Vec<String> {
    let mut modules = BTreeMap::new();
    collect(root, &mut Vec::new(), &mut modules);
    // By parent: each child with the siblings that it needs.
    let mut needs: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, text) in &modules {
        for path in paths(text).into_iter().filter_map(|path| resolve(&path, module)) {
            let target =
                (0..=path.len()).rev().map(|end| &path[..end]).find(|path| modules.contains_key(*path));
            let Some(target) = target else { continue };
            let common = module.iter().zip(target).take_while(|(one, other)| one == other).count();
            if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                let siblings = needs.entry(module[..common].to_vec()).or_default();
                siblings.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let name = root.parent().unwrap().strip_prefix(workspace).unwrap().display().to_string();
    let mut circles = Vec::new();
    for (parent, needs) in needs {
        let reach: BTreeMap<_, _> = needs.keys().map(|from| (from, reachable(from, &needs))).collect();
        let mut seen = BTreeSet::new();
        for from in needs.keys() {
            let both = |to: &&String| reach.get(to).is_some_and(|back| back.contains(from));
            let circle: Vec<_> = reach[from].iter().filter(both).cloned().collect();
            if !circle.is_empty() && seen.insert(circle.clone()) {
                circles.push(format!("{name}: {}: {}", parent.join("::"), circle.join(", ")));
            }
        }
    }
    circles
}

/// The modules below a folder, each with its text.
fn collect(dir: &Path, module: &mut Module, modules: &mut BTreeMap<Module, String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if matches!(name.as_str(), "tests" | "bin" | "main") {
            continue;
        }
        module.push(name);
        if path.is_dir() {
            collect(&path, module, modules);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let of_crate = module.len() == 1 && module[0] == "lib";
            modules.insert(
                if of_crate { Vec::new() } else { module.clone() },
                std::fs::read_to_string(path).unwrap(),
            );
        }
        module.pop();
    }
}

/// The paths in a file: those of `use`, and those that begin with `crate` or `super`.
fn paths(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let text: String = lines.flat_map(|line| [line.trim(), " "]).collect();
    let mut paths = Vec::new();
    for statement in text.split(';') {
        if let Some(at) = statement.rfind("use ").filter(|at| !statement[*at..].contains("fn ")) {
            expand("", &statement[at + 4..], &mut paths);
        }
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let words = statement.split(|c: char| !is_name(c));
        paths.extend(
            words
                .filter(|word| word.starts_with("crate::") || word.starts_with("super::"))
                .map(str::to_owned),
        );
    }
    paths
}

/// Writes out the braces of a `use`.
fn expand(before: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((first, rest)) = tree.split_once('{') else {
        paths.push(format!("{before}{}", tree.split(" as ").next().unwrap_or_default()));
        return;
    };
    let before = format!("{before}{first}");
    let (mut depth, mut start) = (0_u32, 0);
    for (at, letter) in rest.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                expand(&before, &rest[start..at], paths);
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The path of a module of this crate; `None` for one of another crate.
fn resolve(path: &str, module: &Module) -> Option<Module> {
    let mut parts = path.split("::").map(str::trim).filter(|part| !part.is_empty()).peekable();
    let mut absolute = match *parts.peek()? {
        "crate" => Vec::new(),
        "super" | "self" => module.clone(),
        _ => return None,
    };
    while let Some(part) = parts.next_if(|part| matches!(*part, "crate" | "super" | "self")) {
        if part == "super" {
            absolute.pop();
        }
    }
    absolute.extend(parts.map(str::to_owned));
    Some(absolute)
}

fn reachable(from: &String, needs: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(of) = next.pop() {
        for to in needs.get(of).into_iter().flatten().filter(|to| *to != of) {
            if seen.insert(to.clone()) {
                next.push(to);
            }
        }
    }
    seen
}
