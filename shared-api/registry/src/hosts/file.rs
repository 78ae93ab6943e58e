//! `hosts.toml`, and the files beside it that Docker would read.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use toml::{Table, Value};

use super::{
    Capabilities, MAX_FILE, RegistryEndpoint, default_dial, is_localhost, is_there, split_port, unsupported,
};
use crate::error::RegistryError;
use crate::tls::{Tls, read_limited};

const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_ENDPOINT: &str = "registry-1.docker.io";

/// An endpoint as a file describes it.
#[derive(Default)]
pub(super) struct Host {
    /// Scheme, authority and path. `None`: the registry itself.
    server: Option<(String, String, String)>,
    capabilities: Option<Capabilities>,
    tls: Tls,
    tls_is_set: bool,
    headers: HeaderMap,
    dial: Option<Duration>,
}

/// Reads the configuration in the directory of a registry.
pub(super) fn load(
    dir: &Path,
    registry: &str,
    ignores_server_alone: bool,
) -> Result<Vec<RegistryEndpoint>, RegistryError> {
    let file = dir.join("hosts.toml");
    let text = if is_there(&file)? {
        let unreadable = |error| unsupported(format!("cannot read {}: {error}", file.display()));
        read_limited(&file, MAX_FILE).map_err(unreadable)?
    } else {
        Vec::new()
    };
    let table = if text.is_empty() { None } else { Some(read_table(&text, &file)?) };
    let hosts = match table {
        Some(table) if table.contains_key("host") || !ignores_server_alone => {
            parse_hosts(dir, &table, &file)?
        }
        _ => vec![docker_files(dir)?],
    };
    hosts.into_iter().map(|host| host.into_endpoint(registry)).collect()
}

fn read_table(text: &[u8], file: &Path) -> Result<Table, RegistryError> {
    let bad = |what: &str| unsupported(format!("{}: {what}", file.display()));
    let text = std::str::from_utf8(text).map_err(|_| bad("not UTF-8"))?;
    // Not the parser's own message: it shows the line, which may be a header with a password.
    toml::from_str(text).map_err(|error: toml::de::Error| bad(error.message()))
}

fn parse_hosts(dir: &Path, table: &Table, file: &Path) -> Result<Vec<Host>, RegistryError> {
    let bad = |what: &str| unsupported(format!("{}: {what}", file.display()));
    let server = match table.get("server") {
        None => "",
        Some(Value::String(server)) => server,
        Some(_) => return Err(bad("server is no text")),
    };
    let mut hosts = Vec::new();
    match table.get("host") {
        None => {}
        Some(Value::Table(named)) => {
            for (name, host) in named {
                let Value::Table(host) = host else { return Err(bad("host is no table of tables")) };
                hosts.push(Host::parse(name, dir, host).map_err(|what| bad(&what))?);
            }
        }
        Some(_) => return Err(bad("host is no table")),
    }
    hosts.push(Host::parse(server, dir, table).map_err(|what| bad(&what))?);
    Ok(hosts)
}

/// Certificates in Docker's layout: `*.crt` are CAs, and each `*.cert` is a client certificate with its key in `*.key`.
fn docker_files(dir: &Path) -> Result<Host, RegistryError> {
    let unreadable = |error| unsupported(format!("cannot read {}: {error}", dir.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        files.push(entry.map_err(unreadable)?.path());
    }
    files.sort();
    let mut host = Host::default();
    for file in files.iter().filter(|file| !file.is_dir()) {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => host.tls.add_ca(file)?,
            Some("cert") => {
                let key = file.with_extension("key");
                host.tls.add_pair(file, key.exists().then_some(key.as_path()))?;
            }
            _ => continue,
        }
        host.tls_is_set = true;
    }
    Ok(host)
}

impl Host {
    fn parse(server: &str, dir: &Path, table: &Table) -> Result<Self, String> {
        let mut host = Self { server: parse_server(server, table)?, ..Self::default() };
        host.capabilities = table.get("capabilities").map(parse_capabilities).transpose()?;
        let absolute = |file: &str| dir.join(file);
        for ca in table.get("ca").map(|value| texts(value, "ca")).transpose()?.unwrap_or_default() {
            host.tls.add_ca(&absolute(ca)).map_err(|error| error.message)?;
            host.tls_is_set = true;
        }
        for (certificate, key) in table.get("client").map(certificate_pairs).transpose()?.unwrap_or_default()
        {
            let key: Option<PathBuf> = key.map(absolute);
            host.tls.add_pair(&absolute(certificate), key.as_deref()).map_err(|error| error.message)?;
            host.tls_is_set = true;
        }
        match table.get("skip_verify") {
            None => {}
            Some(Value::Boolean(skip)) => {
                host.tls.skip_verify(*skip);
                host.tls_is_set = true;
            }
            Some(_) => return Err("skip_verify is neither true nor false".to_owned()),
        }
        if let Some(headers) = table.get("header") {
            host.headers = parse_headers(headers)?;
        }
        if let Some(dial) = table.get("dial_timeout") {
            let text = dial.as_str().ok_or("dial_timeout is no text")?;
            host.dial = go_duration(text).ok_or("dial_timeout is no duration such as 5s")?.into();
        }
        Ok(host)
    }

    /// The registry itself, which may be asked for everything.
    fn of_registry(&mut self, registry: &str) -> (String, String, String) {
        self.capabilities = Some(Capabilities::ALL);
        let (_, port) = split_port(registry);
        let (scheme, authority) = if registry == DOCKER_HUB {
            ("https", DOCKER_HUB_ENDPOINT)
        } else if is_localhost(registry) {
            if port != Some("80") {
                self.tls.skip_verify(true);
                self.tls_is_set = true;
            }
            (if matches!(port, None | Some("443")) { "https" } else { "http" }, registry)
        } else {
            ("https", registry)
        };
        (scheme.to_owned(), authority.to_owned(), "/v2".to_owned())
    }

    /// Fills in what follows from the registry.
    pub(super) fn into_endpoint(mut self, registry: &str) -> Result<RegistryEndpoint, RegistryError> {
        let (scheme, authority, path) = self.server.take().unwrap_or_else(|| self.of_registry(registry));
        let (_, port) = split_port(&authority);
        // containerd's rule: who configures TLS for a host means TLS, if the port leaves it open.
        let may_fall_back = scheme == "http" && self.tls_is_set && port != Some("80");
        let scheme = if may_fall_back { "https".to_owned() } else { scheme };
        let endpoint = RegistryEndpoint {
            scheme,
            authority,
            path,
            capabilities: self.capabilities.unwrap_or(Capabilities::ALL),
            tls: self.tls,
            headers: self.headers,
            dial: self.dial.unwrap_or(default_dial()),
            may_fall_back,
        };
        endpoint.uri(&endpoint.scheme, "/")?;
        Ok(endpoint)
    }
}

fn parse_server(server: &str, table: &Table) -> Result<Option<(String, String, String)>, String> {
    if server.is_empty() {
        return Ok(None);
    }
    let override_path = match table.get("override_path") {
        None => false,
        Some(Value::Boolean(set)) => *set,
        Some(_) => return Err("override_path is neither true nor false".to_owned()),
    };
    // A password in the URL must not get into a message.
    let shown = server.rsplit('@').next().unwrap_or_default();
    let whole = if server.starts_with("http") { server.to_owned() } else { format!("https://{server}") };
    let uri: Uri = whole.parse().map_err(|_| format!("{shown:?} is no server"))?;
    let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(format!("{shown:?} is no server"));
    };
    if authority.as_str().contains('@') || uri.query().is_some() {
        return Err(format!("{shown:?}: a user or a query in the URL is not supported"));
    }
    let mut path = clean(uri.path());
    if !override_path && !path.ends_with("/v2") {
        path.push_str("/v2");
    }
    Ok(Some((scheme.to_owned(), authority.to_string(), path)))
}

/// A path without empty and relative parts; the root is empty.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.iter().fold(String::new(), |path, part| path + "/" + part)
}

fn parse_capabilities(value: &Value) -> Result<Capabilities, String> {
    let words = texts(value, "capabilities")?;
    if words.is_empty() {
        return Ok(Capabilities::ALL);
    }
    let mut all = Capabilities::NONE;
    for word in words {
        match word.to_lowercase().as_str() {
            "pull" => all.pull = true,
            "resolve" => all.resolve = true,
            "referrers" => all.referrers = true,
            "push" => {}
            _ => return Err(format!("unknown capability {word:?}")),
        }
    }
    Ok(all)
}

/// A text, or a list of them.
fn texts<'a>(value: &'a Value, field: &str) -> Result<Vec<&'a str>, String> {
    let bad = || format!("{field} is neither a text nor a list of texts");
    match value {
        Value::String(text) => Ok(vec![text]),
        Value::Array(texts) => texts.iter().map(|text| text.as_str().ok_or_else(bad)).collect(),
        _ => Err(bad()),
    }
}

/// Files with certificate and key in one, or pairs of them.
fn certificate_pairs<'a>(value: &'a Value) -> Result<Vec<(&'a str, Option<&'a str>)>, String> {
    let bad = || "client is neither a file nor a list of files nor of pairs of files".to_owned();
    let pair = |value: &'a Value| match value {
        Value::String(file) => Ok((file.as_str(), None)),
        Value::Array(pair) => match &pair[..] {
            [Value::String(certificate), Value::String(key)] => {
                Ok((certificate.as_str(), Some(key.as_str()).filter(|key| !key.is_empty())))
            }
            _ => Err(bad()),
        },
        _ => Err(bad()),
    };
    match value {
        Value::Array(all) => all.iter().map(pair).collect(),
        one => Ok(vec![pair(one)?]),
    }
}

fn parse_headers(value: &Value) -> Result<HeaderMap, String> {
    let Value::Table(table) = value else { return Err("header is no table".to_owned()) };
    let mut headers = HeaderMap::new();
    for (name, value) in table {
        // Names alone: a value may be a password.
        let bad = || format!("header {name:?} cannot be sent");
        let header = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
        for value in texts(value, &format!("header {name:?}"))? {
            let mut value = HeaderValue::from_str(value).map_err(|_| bad())?;
            value.set_sensitive(true);
            headers.append(header.clone(), value);
        }
    }
    Ok(headers)
}

/// A duration as Go writes it, in whole numbers: `5s`, `1m30s`, `500ms`.
fn go_duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut all = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u32 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let one = match &rest[..unit] {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3600),
            _ => return None,
        };
        all += one.checked_mul(number)?;
        rest = &rest[unit..];
    }
    (!all.is_zero()).then_some(all)
}
