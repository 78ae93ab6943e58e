//! Completion by kubectl's convention: the program `kubectl_complete-prepull` in the PATH gets the words that were typed, and
//! prints candidates, a line each, with a description after a tab, and a directive at the end.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgAction, Command, CommandFactory};
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::api::{Api, ListParams};
use kube::config::Kubeconfig;
use kube::{Resource, ResourceExt};
use prepull_api::crd::EDGE_LABEL;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::edges::sites::SiteQuery;
use serde::de::DeserializeOwned;

use crate::cli::Cli;
use crate::cluster::Cluster;
use crate::edges;
use crate::job_fields;
use crate::output::print;
use crate::session::{GlobalArgs, SYSTEM};

/// The name by which kubectl calls this program for completion: a link to it.
const PROGRAM: &str = "kubectl_complete-prepull";
/// Names that are asked for at once.
const NAMES_OF_A_PAGE: u32 = 1_000;
/// Names that are offered. More are no help.
const NAMES: usize = 1_000;
/// How long a person waits for a completion.
const PATIENCE: Duration = Duration::from_secs(3);
/// Cobra's directives: only these candidates, or files.
const ONLY_THESE: &str = ":4";
const FILES: &str = ":0";

/// What the word under the cursor may be.
#[derive(Debug, PartialEq)]
enum WordKind {
    Words(Vec<(String, String)>),
    Job,
    Node,
    Secret,
    Site,
    Context,
    File,
}

/// The words to complete, if that is what the program was called for.
pub(crate) fn asked_for(arguments: &[OsString]) -> Option<Vec<String>> {
    let program = PathBuf::from(arguments.first()?);
    let is_asked = program.file_name().is_some_and(|name| name == PROGRAM);
    is_asked.then(|| arguments[1..].iter().map(|word| word.to_string_lossy().into_owned()).collect())
}

/// Prints the candidates. What goes wrong means that there are none: a completion has no place for an error.
pub(crate) async fn run(words: &[String]) -> anyhow::Result<()> {
    let (wanted, global) = parse_words(&Cli::command(), words);
    let typed = words.last().map(String::as_str).unwrap_or_default();
    let candidates = match wanted {
        WordKind::Words(words) => words,
        WordKind::Context => contexts(&global),
        WordKind::File => return print(&format!("{FILES}\n")),
        of_cluster => {
            // As long as a person waits.
            let found = tokio::time::timeout(PATIENCE, look_up(&of_cluster, typed, &global)).await;
            found.ok().flatten().unwrap_or_default().into_iter().map(|name| (name, String::new())).collect()
        }
    };
    let fitting = candidates.iter().filter(|(word, _)| word.starts_with(typed));
    let lines =
        fitting.map(|(word, what)| if what.is_empty() { word.clone() } else { format!("{word}\t{what}") });
    print(&format!("{}\n", lines.chain([ONLY_THESE.to_owned()]).collect::<Vec<_>>().join("\n")))
}

async fn look_up(wanted: &WordKind, typed: &str, global: &GlobalArgs) -> Option<Vec<String>> {
    let cluster = Cluster::connect(global).await.ok()?;
    let client = cluster.client();
    match wanted {
        WordKind::Job => object_names(&Api::<ImagePrePullJob>::all(client), None, typed).await,
        WordKind::Node => object_names(&Api::<Node>::all(client), Some(EDGE_LABEL), typed).await,
        // By their names alone: their content isn't read.
        WordKind::Secret => {
            object_names(&Api::<Secret>::namespaced(client, cluster.namespace()), None, typed).await
        }
        WordKind::Site => {
            let list = edges::read_sites(&cluster, &SiteQuery::default()).await.ok()?;
            Some(list.items.into_iter().map(|site| site.name).collect())
        }
        WordKind::Words(_) | WordKind::Context | WordKind::File => None,
    }
}

/// The names that begin with what was typed. They may be on any page, and a page that can't be read ends them.
async fn object_names<K>(api: &Api<K>, labelled: Option<&str>, typed: &str) -> Option<Vec<String>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut asked = ListParams::default().limit(NAMES_OF_A_PAGE);
    asked.label_selector = labelled.map(str::to_owned);
    let mut names = Vec::new();
    while let Ok(page) = api.list_metadata(&asked).await {
        names.extend(page.items.iter().map(ResourceExt::name_any).filter(|name| name.starts_with(typed)));
        let Some(token) = page.metadata.continue_.filter(|token| !token.is_empty() && names.len() < NAMES)
        else {
            break;
        };
        asked.continue_token = Some(token);
    }
    names.truncate(NAMES);
    Some(names)
}

fn contexts(global: &GlobalArgs) -> Vec<(String, String)> {
    let read = global.kubeconfig.as_ref().map_or_else(Kubeconfig::read, Kubeconfig::read_from);
    let contexts = read.map(|file| file.contexts).unwrap_or_default();
    contexts.into_iter().map(|context| (context.name, String::new())).collect()
}

/// What the last word may be, and the flags of the cluster among those before it.
fn parse_words(root: &Command, words: &[String]) -> (WordKind, GlobalArgs) {
    let globals: Vec<&Arg> = root.get_arguments().filter(|arg| arg.is_global_set()).collect();
    let mut global = GlobalArgs { system_namespace: SYSTEM.to_owned(), ..GlobalArgs::default() };
    let (mut command, mut positionals) = (root, 0);
    let (typed, before) = match words.split_last() {
        Some((typed, before)) => (typed.as_str(), before),
        None => ("", words),
    };
    // The flag that takes the next word as its value.
    let mut open: Option<&Arg> = None;
    for word in before {
        if let Some(flag) = open.take() {
            set_global_flag(&mut global, flag, word);
        } else if word.starts_with('-') {
            let (name, value) =
                word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
            let flag = flags(command, &globals).find(|flag| is_named(flag, name));
            match (flag.filter(|flag| takes_value(flag)), value) {
                (Some(flag), Some(value)) => set_global_flag(&mut global, flag, value),
                (flag, _) => open = flag,
            }
        } else if let Some(inner) = command.find_subcommand(word) {
            command = inner;
        } else {
            positionals += 1;
        }
    }
    let wanted = match open {
        Some(flag) => of_argument(flag),
        None if typed.starts_with('-') => {
            let shown = flags(command, &globals).filter(|flag| !flag.is_hide_set());
            let named =
                shown.filter_map(|flag| Some((format!("--{}", flag.get_long()?), help(flag.get_help()))));
            WordKind::Words(named.collect())
        }
        None if command.has_subcommands() => {
            let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
            WordKind::Words(
                shown.map(|inner| (inner.get_name().to_owned(), help(inner.get_about()))).collect(),
            )
        }
        None => of_positional(command, positionals).map_or(WordKind::Words(Vec::new()), of_argument),
    };
    (wanted, global)
}

/// The positional argument of this number. The last one may take several words.
fn of_positional(command: &Command, number: usize) -> Option<&Arg> {
    let last = command.get_positionals().last().filter(|last| matches!(last.get_action(), ArgAction::Append));
    command.get_positionals().nth(number).or(last)
}

fn flags<'a>(command: &'a Command, globals: &[&'a Arg]) -> impl Iterator<Item = &'a Arg> {
    command
        .get_opts()
        .chain(command.get_arguments().filter(|arg| !arg.is_positional() && !takes_value(arg)))
        .chain(globals.to_vec())
}

fn is_named(flag: &Arg, name: &str) -> bool {
    let long = flag.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long));
    long || flag.get_short().is_some_and(|short| name.strip_prefix('-') == Some(short.to_string().as_str()))
}

fn takes_value(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::Set | ArgAction::Append) && !flag.is_require_equals_set()
}

fn set_global_flag(global: &mut GlobalArgs, flag: &Arg, value: &str) {
    match flag.get_id().as_str() {
        "kubeconfig" => global.kubeconfig = Some(value.into()),
        "context" => global.context = Some(value.to_owned()),
        "namespace" => global.namespace = Some(value.to_owned()),
        "system_namespace" => value.clone_into(&mut global.system_namespace),
        _ => {}
    }
}

/// What a value of an argument may be, by its name.
fn of_argument(argument: &Arg) -> WordKind {
    match argument.get_id().as_str() {
        "job" => WordKind::Job,
        "node" | "nodes" => WordKind::Node,
        "secret" => WordKind::Secret,
        "site" => WordKind::Site,
        "context" => WordKind::Context,
        "settings" => {
            WordKind::Words(job_fields::keys().map(|key| (format!("{key}="), String::new())).collect())
        }
        "kubeconfig" | "filename" | "secrets" => WordKind::File,
        _ => {
            let values = argument.get_possible_values();
            WordKind::Words(
                values.iter().map(|value| (value.get_name().to_owned(), help(value.get_help()))).collect(),
            )
        }
    }
}

fn help(text: Option<&clap::builder::StyledStr>) -> String {
    text.map(ToString::to_string).unwrap_or_default().lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> (WordKind, GlobalArgs) {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let mut root = Cli::command();
        root.build();
        parse_words(&root, &words)
    }

    fn has(line: &str, word: &str) -> bool {
        matches!(of(line).0, WordKind::Words(words) if words.iter().any(|(known, _)| known == word))
    }

    #[test]
    fn completes_commands_flags_and_values() {
        assert!(has("", "status") && has("st", "suspend"));
        assert!(has("status --", "--watch") && has("status --", "--context") && has("run --", "--wave"));
        assert!(has("status web -o ", "json") && has("status --output ", "wide"));
        assert!(!has("status web ", "status"));
        assert!(has("completion ", "zsh"));
        assert!(has("set web ", "rate=") && has("set web rate=2Mi ", "window="));
    }

    #[test]
    fn completes_jobs_nodes_and_files() {
        for (line, expected) in [
            ("status ", WordKind::Job),
            ("status --watch we", WordKind::Job),
            ("status -n shop --context c ", WordKind::Job),
            ("retry ", WordKind::Job),
            ("run nginx --node ", WordKind::Node),
            ("from -f ", WordKind::File),
            ("allow ", WordKind::Secret),
            ("run nginx --secret ", WordKind::Secret),
            ("rates ", WordKind::Site),
            ("sites ", WordKind::Site),
            ("status --context ", WordKind::Context),
            ("status --kubeconfig ", WordKind::File),
            ("status web x", WordKind::Words(Vec::new())),
        ] {
            assert_eq!(of(line).0, expected, "{line}");
        }
        let (_, global) = of("status --context=prod --kubeconfig file -n shop ");
        assert_eq!((global.context.as_deref(), global.namespace.as_deref()), (Some("prod"), Some("shop")));
        assert_eq!(global.kubeconfig, Some("file".into()));
    }

    #[test]
    fn only_the_program_of_kubectls_convention_completes() {
        let asked = |program: &str| asked_for(&[program.into(), "status".into(), "".into()]);
        assert_eq!(asked("/bin/kubectl_complete-prepull"), Some(vec!["status".to_owned(), String::new()]));
        assert_eq!(asked("kubectl-prepull"), None);
    }
}
