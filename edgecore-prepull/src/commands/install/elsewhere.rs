//! How to start the agent where no systemd runs, and how to be rid of it: commands to paste, any number of times.

use std::path::Path;

use super::places::Places;
use super::plan::Init;

/// What is left to be done, everything else being in place.
pub(super) fn explain(init: Init, program: &Path, places: &Places) -> String {
    let (program, settings) = (program.display(), places.settings.display());
    let run = format!("{program} run --config {settings}");
    match init {
        // A network that nothing provides would be an error to `need`, and the agent waits for it by itself.
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
        // Without a log service, what the agent says is lost. svlogd keeps the last 10 MB.
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

/// How to stop the agent, and to have nothing start it any more.
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
            "end its process, and whatever starts it (a pod of the DaemonSet, perhaps)"
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;

    use super::*;

    /// Runs what is to be pasted, with this directory as `/`, and commands of OpenRC that do nothing.
    fn paste(init: Init, root: &Path) {
        let places = Places::default();
        let said = explain(init, &places.program, &places);
        // Behind the heading, and before what is said at the end.
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
    fn what_is_to_be_pasted_makes_a_service_also_the_second_time() {
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
                    // Which a shell accepts; the run of it is the init's.
                    let file = root.path().join(script);
                    let checked = Command::new("sh").arg("-n").arg(&file).status().unwrap();
                    assert!(checked.success(), "{script}: {}", std::fs::read_to_string(&file).unwrap());
                }
            }
        }
    }
}
