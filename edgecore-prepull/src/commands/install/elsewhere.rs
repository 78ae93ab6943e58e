//! How to start the agent where no systemd runs: commands to paste.

use super::places::Places;
use super::plan::Init;

/// What is left to be done, everything else being in place.
pub(super) fn explain(init: Init, places: &Places) -> String {
    let (program, settings) = (places.program.display(), places.settings.display());
    let run = format!("{program} run --config {settings}");
    match init {
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
             depend() {{ need net; after containerd; }}\n\
             END\n\
             chmod 755 /etc/init.d/edgecore-prepull\n\
             rc-update add edgecore-prepull default\n\
             rc-service edgecore-prepull start\n"
        ),
        Init::Runit => format!(
            "runit starts services here. As root:\n\n\
             mkdir -p /etc/sv/edgecore-prepull\n\
             cat >/etc/sv/edgecore-prepull/run <<'END'\n\
             #!/bin/sh\n\
             exec {run} 2>&1\n\
             END\n\
             chmod 755 /etc/sv/edgecore-prepull/run\n\
             ln -s /etc/sv/edgecore-prepull {services}/\n",
            services = "\"$(if [ -d /var/service ]; then echo /var/service; else echo /etc/service; fi)\"",
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
