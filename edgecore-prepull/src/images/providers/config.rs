//! The kubelet's `CredentialProviderConfig`: parsing it, and checks of the programs that it names.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prepull_api::credentials::RegistryPattern;
use serde::Deserialize;
use serde::de::IgnoredAny;
use thiserror::Error;

use super::duration;
use super::protocol::{self, PluginApiVersion};

const GROUP: &str = "kubelet.config.k8s.io/";
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];
/// The largest file in bytes. A provider takes about 500, so there is room for hundreds.
const MAX_FILE: u64 = 1024 * 1024;

/// The configuration of one provider, validated.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ProviderConfig {
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) matches: Vec<RegistryPattern>,
    pub(super) default_cache_duration: Duration,
    pub(super) version: PluginApiVersion,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
}

/// Leaves out arguments and environment, which may hold secrets.
impl std::fmt::Debug for ProviderConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, program, matches, default_cache_duration, version, args: _, env: _ } = self;
        f.debug_struct("ProviderConfig")
            .field("name", name)
            .field("program", program)
            .field("matches", matches)
            .field("default_cache_duration", default_cache_duration)
            .field("version", version)
            .finish_non_exhaustive()
    }
}

/// Reason why the providers can't be loaded.
#[derive(Debug, Error)]
pub(crate) enum ProvidersError {
    /// One of the two flags is set without the other.
    #[error("{given} is set and {missing} is not: set both, or neither")]
    HalfSet {
        /// The flag that is set.
        given: &'static str,
        /// The flag that is not.
        missing: &'static str,
    },
    /// The file cannot be read.
    #[error("cannot read --image-credential-provider-config {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file as a whole is invalid.
    #[error("--image-credential-provider-config {}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the remedy.
        problem: String,
    },
    /// One provider in the file is invalid.
    #[error("--image-credential-provider-config {}: provider {provider}: {field}: {problem}", path.display())]
    Provider {
        /// The file.
        path: PathBuf,
        /// The provider's name, or its position in the list if it has none.
        provider: String,
        /// The field as the file spells it.
        field: &'static str,
        /// What is wrong, with the remedy.
        problem: String,
    },
    /// The directory of the programs, or a program in it, cannot be used.
    #[error("--image-credential-provider-bin-dir {}: {problem}", path.display())]
    BinDir {
        /// The directory.
        path: PathBuf,
        /// What is wrong, with the remedy.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProvidersFile {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    providers: Vec<Raw>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    #[serde(default)]
    default_cache_duration: Option<String>,
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<EnvVar>>,
    #[serde(default)]
    token_attributes: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvVar {
    name: String,
    #[serde(default)]
    value: String,
}

/// Reads the file and checks the programs. For a directory, reads its .yaml, .yml and .json files in the order of their
/// names, as newer kubelets do.
pub(super) fn load(path: &Path, bin_dir: &Path) -> Result<Vec<ProviderConfig>, ProvidersError> {
    let mut names = BTreeSet::new();
    let mut providers = Vec::new();
    for file in list_files(path)? {
        let text = read_file(&file)?;
        providers.extend(parse(&file, bin_dir, &text, &mut names)?);
    }
    let in_dir = |problem| ProvidersError::BinDir { path: bin_dir.to_owned(), problem };
    let metadata = std::fs::metadata(bin_dir).map_err(|error| in_dir(error.to_string()))?;
    if !metadata.is_dir() {
        return Err(in_dir("is not a directory".to_owned()));
    }
    check_owner(&metadata).map_err(in_dir)?;
    for ProviderConfig { name, program, .. } in &providers {
        check_program(program).map_err(|problem| {
            in_dir(format!("the program of provider {name}, {}, {problem}", program.display()))
        })?;
    }
    Ok(providers)
}

fn list_files(path: &Path) -> Result<Vec<PathBuf>, ProvidersError> {
    let unread = |source| ProvidersError::Read { path: path.to_owned(), source };
    let wrong = |problem| ProvidersError::File { path: path.to_owned(), problem };
    let metadata = std::fs::metadata(path).map_err(unread)?;
    check_owner(&metadata).map_err(wrong)?;
    if !metadata.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(unread)? {
        let file = entry.map_err(unread)?.path();
        let is_config =
            file.extension().is_some_and(|end| ["json", "yaml", "yml"].iter().any(|it| end == *it));
        if is_config && !file.is_dir() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(wrong("is a directory without a .yaml, .yml or .json file".to_owned()));
    }
    files.sort();
    Ok(files)
}

fn read_file(path: &Path) -> Result<String, ProvidersError> {
    let unread = |source| ProvidersError::Read { path: path.to_owned(), source };
    let wrong = |problem| ProvidersError::File { path: path.to_owned(), problem };
    let file = std::fs::File::open(path).map_err(unread)?;
    check_owner(&file.metadata().map_err(unread)?).map_err(wrong)?;
    let mut text = String::new();
    file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(unread)?;
    if text.len() as u64 > MAX_FILE {
        return Err(wrong(format!("is longer than {} KiB", MAX_FILE / 1024)));
    }
    Ok(text)
}

/// Parses the text of a file. `names` are the providers of the files before it.
fn parse(
    path: &Path,
    bin_dir: &Path,
    text: &str,
    names: &mut BTreeSet<String>,
) -> Result<Vec<ProviderConfig>, ProvidersError> {
    let in_file = |problem: String| ProvidersError::File { path: path.to_owned(), problem };
    // The error must not quote the line, which may hold a secret in an environment variable.
    let ProvidersFile { api_version, kind, providers } =
        serde_saphyr::from_str(text).map_err(|error| in_file(error.without_snippet().to_string()))?;
    if kind != "CredentialProviderConfig" {
        return Err(in_file(format!("kind is {kind:?}, and must be CredentialProviderConfig")));
    }
    if !api_version.strip_prefix(GROUP).is_some_and(|version| VERSIONS.contains(&version)) {
        return Err(in_file(format!(
            "apiVersion is {api_version:?}, and must be one of {GROUP}{{{}}}",
            VERSIONS.join(",")
        )));
    }
    if providers.is_empty() {
        return Err(in_file("providers is empty: name at least one, or leave the flags away".to_owned()));
    }
    let mut read = Vec::new();
    for (index, raw) in providers.into_iter().enumerate() {
        let provider = if raw.name.is_empty() { format!("number {}", index + 1) } else { raw.name.clone() };
        let config = validate(raw, bin_dir).and_then(|config| {
            let is_new = names.insert(config.name.clone());
            if is_new {
                Ok(config)
            } else {
                Err(("name", "is used twice: each provider needs its own".to_owned()))
            }
        });
        read.push(config.map_err(|(field, problem)| ProvidersError::Provider {
            path: path.to_owned(),
            provider,
            field,
            problem,
        })?);
    }
    Ok(read)
}

/// A field and its problem.
type FieldProblem = (&'static str, String);

fn validate(raw: Raw, bin_dir: &Path) -> Result<ProviderConfig, FieldProblem> {
    let Raw { name, match_images, default_cache_duration, api_version, args, env, token_attributes } = raw;
    let wrong_name = match &*name {
        "" => Some("is missing: it is the name of the program in --image-credential-provider-bin-dir"),
        "." | ".." => Some("must be the name of a program"),
        name if name.contains(['/', '\\']) => Some("must not contain a path separator"),
        name if name.contains(|c: char| c.is_whitespace() || c.is_control()) => {
            Some("must not contain spaces")
        }
        _ => None,
    };
    if let Some(problem) = wrong_name {
        return Err(("name", problem.to_owned()));
    }
    if token_attributes.is_some() {
        return Err((
            "tokenAttributes",
            "service account tokens belong to a pod, and images are pulled ahead for none: remove it here, if the \
             plugin can do without, or give the credentials as a secret of the job"
                .to_owned(),
        ));
    }
    let version = PluginApiVersion::parse(&api_version).ok_or_else(|| {
        ("apiVersion", format!("is {api_version:?}, and must be one of {}", protocol::list_versions()))
    })?;
    if match_images.is_empty() {
        return Err(("matchImages", "is missing: without a pattern the provider is never asked".to_owned()));
    }
    let matches = match_images.iter().map(|text| RegistryPattern::parse_match_image(text));
    let matches = matches.collect::<Result<_, _>>().map_err(|error| ("matchImages", error.to_string()))?;
    let default_cache_duration = match default_cache_duration {
        None => Err("is missing: write 0s for no caching, or as long as the credentials live".to_owned()),
        Some(text) => match duration::parse(&text) {
            Some(read) if !read.negative => Ok(read.length),
            Some(_) => Err(format!("is {text:?}, and must not be negative")),
            None => Err(format!("is {text:?}, which is not a duration: write 12h, 30m or 0s")),
        },
    }
    .map_err(|problem| ("defaultCacheDuration", problem))?;
    let mut variables = Vec::new();
    for EnvVar { name, value } in env.unwrap_or_default() {
        // The operating system accepts none of these. The value may be a secret, so we don't show it.
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err((
                "env",
                "a name must not be empty nor contain =, and nothing may contain NUL".to_owned(),
            ));
        }
        variables.push((name, value));
    }
    let args = args.unwrap_or_default();
    if args.iter().any(|arg| arg.contains('\0')) {
        return Err(("args", "must not contain NUL".to_owned()));
    }
    let program = bin_dir.join(&name);
    Ok(ProviderConfig { name, program, matches, default_cache_duration, version, args, env: variables })
}

fn check_program(path: &Path) -> Result<(), String> {
    let metadata = std::fs::metadata(path).map_err(|error| format!("cannot be used: {error}"))?;
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 {
        return Err("is not an executable file: chmod 755".to_owned());
    }
    check_owner(&metadata)
}

/// Refuses a file that other users may write: they could run programs as the agent's user and see credentials.
fn check_owner(metadata: &Metadata) -> Result<(), String> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    judge_owner((metadata.uid(), metadata.gid(), metadata.mode()), (user, group))
}

fn judge_owner((owner, owners, mode): (u32, u32, u32), (user, group): (u32, u32)) -> Result<(), String> {
    if owner != 0 && owner != user {
        return Err(format!("belongs to user {owner}, who could replace it: chown root:root"));
    }
    let by_group = mode & 0o020 != 0 && owners != 0 && owners != group;
    if by_group || mode & 0o002 != 0 {
        return Err(format!(
            "is writable by others than root (mode {:o}): chown root:root, chmod go-w",
            mode & 0o7777
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
