//! Instructions for starting and removing the agent without systemd: commands to paste, any number of times.

use std::path::Path;

use super::places::InstallPlaces;
use super::plan::Init;

/// Reads the file of the proxies as systemd reads an EnvironmentFile. No text of it is run: a password may have any character.
/// Lines are trimmed by `read`; comments have no name of a variable.
const READ_PROXIES: &str = r#"[ ! -r PROXIES ] || while read -r line || [ -n "$line" ]; do
    key=${line%%=*} value=${line#*=}
    case $line in *=*) ;; *) continue ;; esac
    case $key in ''|[0-9]*|*[!A-Za-z0-9_]*) continue ;; esac
    case $value in
    \"*\") value=${value#?} value=$(printf %s "${value%?}" | sed 's/\\\([\"$`]\)/\1/g') ;;
    \'*\') value=${value#?} value=${value%?} ;;
    *) value=$(printf %s "$value" | sed 's/\\\(.\)/\1/g') ;;
    esac
    export "$key=$value"
done <PROXIES
"#;

/// The remaining steps, once everything else is in place.
pub(super) fn explain_start(init: Init, program: &Path, places: &InstallPlaces) -> String {
    let (program, settings) = (program.display(), places.settings.display());
    let run = format!("{program} run --config {settings}");
    let proxies = places.proxies.display().to_string();
    let read_proxies = READ_PROXIES.replace("PROXIES", &proxies);
    match init {
        // `need` would fail for a network that no service provides, and the agent waits for the network by itself.
        Init::OpenRc => format!(
            "OpenRC starts services here. As root:\n\n\
             cat >/etc/init.d/edgecore-prepull <<'END'\n\
             #!/sbin/openrc-run\n\
             description=\"Pulls container images ahead of the applications that need them\"\n\
             supervisor=supervise-daemon\n\
             command={program}\n\
             command_args=\"run --config {settings}\"\n\
             output_log=/var/log/edgecore-prepull.log\n\
             error_log=/var/log/edgecore-prepull.log\n\
             respawn_delay=5\n\
             respawn_max=0\n\
             retry=SIGTERM/20/SIGKILL/5\n\
             depend() {{ use net; after containerd; }}\n\
             start_pre() {{\n\
             {read_proxies}\
             }}\n\
             END\n\
             chmod 755 /etc/init.d/edgecore-prepull\n\
             rc-update add edgecore-prepull default\n\
             rc-service edgecore-prepull restart\n\n\
             The log grows: have logrotate cut it, with copytruncate.\n"
        ),
        // Without a log service, the agent's log is lost. svlogd keeps the last 10 MB.
        Init::Runit => format!(
            "runit starts services here. As root:\n\n\
             mkdir -p /etc/sv/edgecore-prepull/log /var/log/edgecore-prepull\n\
             cat >/etc/sv/edgecore-prepull/run <<'END'\n\
             #!/bin/sh\n\
             {read_proxies}\
             exec {run} 2>&1\n\
             END\n\
             cat >/etc/sv/edgecore-prepull/log/run <<'END'\n\
             #!/bin/sh\n\
             exec svlogd /var/log/edgecore-prepull\n\
             END\n\
             chmod 755 /etc/sv/edgecore-prepull/run /etc/sv/edgecore-prepull/log/run\n\
             for services in /var/service /etc/service /run/runit/service; do [ ! -d $services ] || break; done\n\
             ln -sf /etc/sv/edgecore-prepull $services/\n\n\
             It starts within 5 s. Where it has run before, `sv restart edgecore-prepull` takes over what was \
             changed.\n",
        ),
        Init::Container => format!(
            "This is a container, which nothing but its image should change. Let its runtime start, as the only \
             process,\n\n{run}\n\nwith {state} on a volume and the runtime's socket mounted; in a cluster that is the \
             DaemonSet of manifests/edgecore-prepull.\n",
            state = places.state.display(),
        ),
        Init::Systemd | Init::Unknown => format!(
            "Have the manager of services here run, as root, restart it 5 s after it ends, and end it with SIGTERM, with \
             the variables of {proxies} if it's there:\n\n{run}\n"
        ),
    }
}

/// Instructions for stopping the agent for good.
pub(crate) fn explain_stop(init: Init) -> &'static str {
    match init {
        Init::OpenRc => {
            "`rc-service edgecore-prepull stop; rc-update delete edgecore-prepull; rm -f /etc/init.d/edgecore-prepull \
             /var/log/edgecore-prepull.log`"
        }
        Init::Runit => {
            "`sv stop edgecore-prepull; rm -rf /var/service/edgecore-prepull /etc/service/edgecore-prepull \
             /run/runit/service/edgecore-prepull /etc/sv/edgecore-prepull /var/log/edgecore-prepull`"
        }
        Init::Systemd | Init::Container | Init::Unknown => {
            "end its process, and disable its supervisor (perhaps a pod of the DaemonSet)"
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;

    use super::super::proxies::plan_file;
    use super::*;

    /// Runs the commands with this directory as `/`, and with stubs for OpenRC.
    fn paste(init: Init, root: &Path) {
        let places = InstallPlaces::default();
        let said = explain_start(init, &root.join("bin/agent"), &places);
        // The commands are between the heading and the closing remark.
        let script = said.split("\n\n").nth(1).unwrap();
        let mut script = script.to_owned();
        for dir in ["/etc/", "/var/"] {
            script = script.replace(dir, &format!("{}{dir}", root.display()));
        }
        let path = format!("{}/bin:/usr/bin:/bin", root.display());
        let output = Command::new("sh").args(["-e", "-c", &script]).env("PATH", path).output().unwrap();
        assert!(output.status.success(), "{init:?}: {output:?}");
    }

    const SCRIPTS: [(Init, &[&str]); 2] = [
        (Init::OpenRc, &["etc/init.d/edgecore-prepull"]),
        (Init::Runit, &["etc/service/edgecore-prepull/run", "etc/service/edgecore-prepull/log/run"]),
    ];

    /// A machine with stubs.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for dir in ["bin", "etc/init.d", "etc/service", "etc/edgecore-prepull"] {
            std::fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        for command in ["bin/rc-update", "bin/rc-service"] {
            std::os::unix::fs::symlink("/bin/true", root.path().join(command)).unwrap();
        }
        let agent = root.path().join("bin/agent");
        std::fs::write(&agent, "#!/bin/sh\nexec env\n").unwrap();
        std::fs::set_permissions(agent, std::fs::Permissions::from_mode(0o755)).unwrap();
        root
    }

    #[test]
    fn the_pasted_commands_work_twice() {
        for (init, scripts) in SCRIPTS {
            let root = machine();
            for _ in 0..2 {
                paste(init, root.path());
                for script in scripts {
                    // A shell must accept it; running it is the init's job.
                    let file = root.path().join(script);
                    let checked = Command::new("sh").arg("-n").arg(&file).status().unwrap();
                    assert!(checked.success(), "{script}: {}", std::fs::read_to_string(&file).unwrap());
                }
            }
        }
    }

    #[test]
    fn services_read_the_proxies_as_systemd_does() {
        let password = r#"http://u:a\\b"c$HOME`id`'d;& e%40*@proxy:3128"#;
        let ours = plan_file(None, Some(&[("HTTPS_PROXY".to_owned(), password.to_owned())])).unwrap();
        let foreign = "; NO=1\n\n export NO=2\nno-name=3\n\
                       HTTP_PROXY=http://$HOME&`id`\\\"\\x  \n  A='$x\\ \"y'\nB=\"a\\x\\$\"\nHTTPS_PROXY=c";
        for (text, expected) in [
            (None, &[][..]),
            (Some(ours.as_str()), &[("HTTPS_PROXY", password)][..]),
            (
                Some(foreign),
                &[
                    ("A", "$x\\ \"y"),
                    ("B", "a\\x$"),
                    ("HTTPS_PROXY", "c"),
                    ("HTTP_PROXY", "http://$HOME&`id`\"x"),
                ],
            ),
        ] {
            for (init, scripts) in SCRIPTS {
                let root = machine();
                paste(init, root.path());
                if let Some(text) = text {
                    std::fs::write(root.path().join("etc/edgecore-prepull/proxy.env"), text).unwrap();
                }
                let script = root.path().join(scripts[0]).display().to_string();
                let start = match init {
                    Init::OpenRc => format!(". {script}; start_pre; exec $command $command_args"),
                    _ => script,
                };
                let started = Command::new("sh").args(["-e", "-c", &start]).env_clear().output().unwrap();
                assert!(started.status.success(), "{init:?}: {started:?}");
                let variables = String::from_utf8(started.stdout).unwrap();
                let mut variables: Vec<_> =
                    variables.lines().filter_map(|line| line.split_once('=')).collect();
                variables.retain(|(name, _)| !["PWD", "_", "SHLVL", "OLDPWD"].contains(name));
                variables.sort_unstable();
                assert_eq!(variables, expected, "{init:?}");
            }
        }
    }
}
