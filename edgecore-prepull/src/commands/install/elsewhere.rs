//! Instructions for starting and removing the agent without systemd: commands to paste, any number of times.

use std::path::Path;

use super::places::InstallPlaces;
use super::plan::Init;

/// The remaining steps, once everything else is in place.
pub(super) fn explain_start(init: Init, program: &Path, places: &InstallPlaces) -> String {
    let (program, settings) = (program.display(), places.settings.display());
    let run = format!("{program} run --config {settings}");
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
            "Have whatever starts services here run, as root, restart it 5 s after it ends, and end it with \
             SIGTERM:\n\n{run}\n"
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
    use std::process::Command;

    use super::*;

    /// Runs the commands with this directory as `/`, and with stubs for OpenRC.
    fn paste(init: Init, root: &Path) {
        let places = InstallPlaces::default();
        let said = explain_start(init, &places.program, &places);
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

    #[test]
    fn the_pasted_commands_work_twice() {
        for (init, scripts) in [
            (Init::OpenRc, &["etc/init.d/edgecore-prepull"][..]),
            (Init::Runit, &["etc/service/edgecore-prepull/run", "etc/service/edgecore-prepull/log/run"]),
        ] {
            let root = tempfile::tempdir().unwrap();
            for dir in ["bin", "etc/init.d", "etc/service"] {
                std::fs::create_dir_all(root.path().join(dir)).unwrap();
            }
            for command in ["bin/rc-update", "bin/rc-service"] {
                std::os::unix::fs::symlink("/bin/true", root.path().join(command)).unwrap();
            }
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
}
