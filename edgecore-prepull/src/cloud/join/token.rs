//! The join token from the command line.

use std::io::{IsTerminal as _, Read, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use prepull_api::credentials::Sensitive;
use prepull_api::enroll::JoinToken;

use super::JoinError;

/// A token has 142 bytes. A longer file is something else, so we don't read it to its end.
const MAX_FILE: u64 = 4096;

/// Where the join token is taken from.
#[derive(Clone, Debug, Default, Args)]
pub struct TokenArgs {
    /// Join token.
    #[arg(long, value_name = "TOKEN", env = "PREPULL_TOKEN", hide_env_values = true)]
    token: Option<SecretArg>,
    /// File with the join token, or - for standard input; wins over --token.
    #[arg(long, value_name = "FILE", env = "PREPULL_TOKEN_FILE")]
    token_file: Option<PathBuf>,
}

/// A secret from the command line: wiped when dropped and never printed, not even in an error about its form.
#[derive(Clone, Debug)]
pub struct SecretArg(Sensitive);

impl From<String> for SecretArg {
    fn from(text: String) -> Self {
        Self(Sensitive::new(text))
    }
}

impl From<String> for TokenArgs {
    fn from(token: String) -> Self {
        Self { token: Some(token.into()), token_file: None }
    }
}

impl From<JoinToken> for TokenArgs {
    fn from(token: JoinToken) -> Self {
        token.expose().into()
    }
}

impl TokenArgs {
    /// The token, if one is given. An empty one counts as not given, because an environment variable that is set to
    /// nothing counts as unset.
    pub(crate) fn read(&self) -> Result<Option<JoinToken>, JoinError> {
        if let Some(file) = self.token_file.as_deref().filter(|file| !file.as_os_str().is_empty()) {
            return read_file(file).map(Some);
        }
        match self.token.as_ref().map(|SecretArg(token)| token.expose()).filter(|token| !token.is_empty()) {
            Some(token) => Ok(Some(token.parse()?)),
            None => Ok(None),
        }
    }
}

fn read_file(file: &Path) -> Result<JoinToken, JoinError> {
    let failed = |reason: String| JoinError::TokenFile { file: file.to_owned(), reason };
    let mut text = String::with_capacity(256);
    let read = if file == Path::new("-") {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            let _ = write!(std::io::stderr(), "Join token, and Ctrl-D: ");
        }
        stdin.lock().take(MAX_FILE).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|opened| opened.take(MAX_FILE).read_to_string(&mut text))
    };
    let text = Sensitive::new(text);
    read.map_err(|error| failed(error.to_string()))?;
    text.expose().parse().map_err(|error: prepull_api::enroll::JoinTokenError| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_token_file_wins_and_is_not_printed() {
        let token = format!("{}.{}.{}", "a".repeat(64), "b".repeat(12), "c".repeat(64));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, format!("{token}\n")).unwrap();
        let of = |token: &str, file: Option<&Path>| TokenArgs {
            token: Some(token.to_owned().into()),
            token_file: file.map(Path::to_owned),
        };
        assert_eq!(of("s3cret", Some(&file)).read().unwrap().unwrap().expose(), token);
        assert_eq!(of(&token, Some(Path::new(""))).read().unwrap().unwrap().expose(), token);
        assert!(of("", None).read().unwrap().is_none());
        assert!(matches!(of("s3cret", None).read(), Err(JoinError::Token(_))));
        std::fs::write(&file, "s3cret").unwrap();
        let said = of(&token, Some(&file)).read().unwrap_err().to_string();
        assert!(said.starts_with("--token-file ") && said.contains("copied whole"), "{said}");
        assert!(!said.contains("s3cret"), "{said}");
        assert!(!format!("{:?}", of("s3cret", None)).contains("s3cret"));
    }
}
