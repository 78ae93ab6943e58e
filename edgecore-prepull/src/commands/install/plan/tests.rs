#![allow(clippy::unwrap_used)]

use super::*;

/// A machine with systemd and without the agent.
fn bare() -> MachineFacts {
    MachineFacts {
        init: Init::Systemd,
        is_packaged: false,
        program: "/root/Downloads/edgecore-prepull-linux-amd64".into(),
        is_program_there: false,
        has_state_dir: false,
        has_own_program: false,
        unit: None,
        settings: None,
        proxies: None,
        upgrade_key: None,
        runtime_proxies: None,
        is_enabled: false,
        is_running: false,
        is_restart_due: false,
        is_state_in_use: false,
        host_name: "Edge-1\n".to_owned(),
        joined: None,
    }
}

/// A machine with a running agent.
fn installed() -> MachineFacts {
    MachineFacts {
        is_program_there: true,
        has_state_dir: true,
        has_own_program: true,
        unit: Some(UNIT_FILE.to_owned()),
        settings: Some(FIRST_SETTINGS.to_owned()),
        is_enabled: true,
        is_running: true,
        is_state_in_use: true,
        joined: Some(JoinedAs {
            node: "edge-1".into(),
            has_expired: false,
            connection: Some(connection("cloud")),
            trusts_token: true,
            is_of_interrupted_run: false,
        }),
        ..bare()
    }
}

fn joined(change: impl FnOnce(&mut JoinedAs)) -> MachineFacts {
    let mut facts = installed();
    change(facts.joined.as_mut().unwrap());
    facts
}

fn connection(host: &str) -> Connection {
    Connection {
        tunnel_urls: format!("wss://{host}:10000/v1/edge").into(),
        enroll_urls: format!("https://{host}:10002").into(),
        node_name: "edge-1".into(),
    }
}

/// The options in the line that `token create` prints.
fn line() -> InstallWish {
    let Connection { tunnel_urls, enroll_urls, .. } = connection("cloud");
    InstallWish { tunnel_urls, enroll_urls, has_token: true, ..InstallWish::default() }
}

fn plan_of(facts: &MachineFacts, wish: &InstallWish) -> Result<InstallPlan, InstallRefusal> {
    plan_install(facts, wish, &InstallPlaces::default())
}

fn steps(facts: &MachineFacts, wish: &InstallWish) -> Vec<InstallStep> {
    plan_of(facts, wish).unwrap().steps
}

#[test]
fn a_bare_machine_joins_first_starts_last() {
    let plan = plan_of(&bare(), &line()).unwrap();
    assert_eq!(plan.node, "edge-1".into(), "the host name, as the kubelet writes it");
    assert_eq!(
        plan.steps,
        [
            InstallStep::CreateStateDir,
            InstallStep::Join { renew: false },
            InstallStep::CopyProgram,
            InstallStep::WriteUnit,
            InstallStep::WriteSettings(FIRST_SETTINGS.to_owned()),
            InstallStep::Reload,
            InstallStep::Enable,
            InstallStep::Start,
            InstallStep::AwaitConnection,
        ]
    );
}

#[test]
fn repeating_the_line_only_checks_the_connection() {
    for wish in [line(), InstallWish { has_token: false, ..line() }, InstallWish::default()] {
        assert_eq!(steps(&installed(), &wish), [InstallStep::AwaitConnection]);
    }
}

#[test]
fn the_same_line_finishes_an_interrupted_run() {
    let whole = steps(&bare(), &line());
    let restart =
        [InstallStep::Reload, InstallStep::Enable, InstallStep::Restart, InstallStep::AwaitConnection];
    for (facts, wanted) in [
        (MachineFacts { has_state_dir: true, ..bare() }, &whole[1..]),
        (
            MachineFacts { is_program_there: false, ..installed() },
            &[InstallStep::CopyProgram, InstallStep::Restart, InstallStep::AwaitConnection],
        ),
        (MachineFacts { is_restart_due: true, ..installed() }, &restart),
        (
            MachineFacts { is_enabled: false, ..installed() },
            &[InstallStep::Enable, InstallStep::AwaitConnection],
        ),
        (
            MachineFacts { is_running: false, is_state_in_use: false, ..installed() },
            &[InstallStep::Start, InstallStep::AwaitConnection],
        ),
        (
            MachineFacts { unit: Some("an older one".to_owned()), ..installed() },
            &[
                InstallStep::WriteUnit,
                InstallStep::Reload,
                InstallStep::Enable,
                InstallStep::Restart,
                InstallStep::AwaitConnection,
            ],
        ),
    ] {
        assert_eq!(steps(&facts, &line()), wanted, "{facts:?}");
    }
}

#[test]
fn a_key_is_written_without_a_restart() {
    let wish = InstallWish { upgrade_key: Some("key".to_owned()), ..InstallWish::default() };
    let write = InstallStep::WriteUpgradeKey("key".to_owned());
    assert_eq!(steps(&installed(), &wish), [write, InstallStep::AwaitConnection]);
    let facts = MachineFacts { upgrade_key: Some("key".to_owned()), ..installed() };
    for wish in [wish, InstallWish::default()] {
        assert_eq!(steps(&facts, &wish), [InstallStep::AwaitConnection]);
    }
}

#[test]
fn the_agent_gets_the_runtimes_proxies() {
    let proxies = Some(vec![("HTTPS_PROXY".to_owned(), "http://u:hunter2@proxy:3128".to_owned())]);
    let facts = MachineFacts { runtime_proxies: proxies, ..installed() };
    let found = plan_install(&facts, &line(), &InstallPlaces::default()).unwrap();
    let [write @ InstallStep::WriteProxies(text), InstallStep::Restart, InstallStep::AwaitConnection] =
        &found.steps[..]
    else {
        panic!("{found:?}")
    };
    let said = write.describe(&found, &InstallPlaces::default());
    assert!(said.contains("/proxy.env (mode 0600): HTTPS_PROXY") && !said.contains("hunter2"), "{said}");
    let facts = MachineFacts { proxies: Some(text.clone()), ..facts };
    assert_eq!(steps(&facts, &line()), [InstallStep::AwaitConnection]);
}

#[test]
fn a_change_needs_a_restart() {
    let other = connection("other");
    let wish = InstallWish {
        tunnel_urls: other.tunnel_urls.clone(),
        enroll_urls: other.enroll_urls.clone(),
        ..line()
    };
    assert_eq!(
        steps(&installed(), &wish),
        [InstallStep::Redirect(other), InstallStep::Restart, InstallStep::AwaitConnection]
    );

    let mut wish = InstallWish::default();
    wish.settings.insert("maxTasks".to_owned(), 2.into());
    let [InstallStep::WriteSettings(text), InstallStep::Restart, InstallStep::AwaitConnection] =
        &steps(&installed(), &wish)[..]
    else {
        panic!("{:?}", steps(&installed(), &wish));
    };
    assert_eq!(*text, FIRST_SETTINGS.replace("\nmaxTasks: 1\n", "\nmaxTasks: 2\n"));
    let again = MachineFacts { settings: Some(text.clone()), ..installed() };
    assert_eq!(steps(&again, &wish), [InstallStep::AwaitConnection]);
    assert_eq!(
        steps(&again, &line()),
        [InstallStep::AwaitConnection],
        "a setting stays until another one is given"
    );
}

#[test]
fn a_node_rejoins_only_without_a_valid_certificate() {
    let first =
        |facts: &MachineFacts, wish: &InstallWish| plan_of(facts, wish).map(|plan| plan.steps[0].clone());
    let expired = joined(|joined| joined.has_expired = true);
    assert_eq!(first(&expired, &line()), Ok(InstallStep::Join { renew: true }));
    let elsewhere = joined(|joined| joined.trusts_token = false);
    assert_eq!(first(&elsewhere, &line()), Ok(InstallStep::Join { renew: false }));
    let rejoin = InstallWish { rejoin: true, ..line() };
    assert_eq!(first(&installed(), &rejoin), Ok(InstallStep::Join { renew: false }));
    assert_eq!(
        first(&installed(), &InstallWish { has_token: false, ..rejoin.clone() }),
        Err(InstallRefusal::Token("to join again"))
    );

    // The run has used the token, which lets the node join once.
    let mut interrupted = joined(|joined| joined.is_of_interrupted_run = true);
    interrupted.is_restart_due = true;
    assert_eq!(first(&interrupted, &rejoin), Ok(InstallStep::Reload));
    // A power cut, and then a boot in place of the restart: the program may be missing.
    interrupted.is_restart_due = false;
    assert_eq!(first(&interrupted, &rejoin), Ok(InstallStep::AwaitConnection));
    interrupted.is_program_there = false;
    assert_eq!(first(&interrupted, &rejoin), Ok(InstallStep::CopyProgram));

    let other = InstallWish { node: Some("edge-2".into()), ..line() };
    let refused = InstallRefusal::OtherNode { joined: "edge-1".into(), wanted: "edge-2".into() };
    assert_eq!(first(&installed(), &other), Err(refused));
    assert_eq!(
        first(&installed(), &InstallWish { rejoin: true, ..other }),
        Ok(InstallStep::Join { renew: false })
    );
}

#[test]
fn a_package_keeps_program_and_unit() {
    let packaged = MachineFacts {
        is_packaged: true,
        is_program_there: true,
        settings: Some(FIRST_SETTINGS.to_owned()),
        ..bare()
    };
    assert_eq!(
        steps(&packaged, &line()),
        [
            InstallStep::CreateStateDir,
            InstallStep::Join { renew: false },
            InstallStep::Enable,
            InstallStep::Start,
            InstallStep::AwaitConnection
        ]
    );
    let downloaded = MachineFacts { is_program_there: false, ..packaged };
    assert_eq!(plan_of(&downloaded, &line()), Err(InstallRefusal::Packaged));
}

#[test]
fn a_package_replaces_an_earlier_install() {
    let InstallPlaces { program, unit, .. } = InstallPlaces::default();
    let packaged = MachineFacts { is_packaged: true, ..installed() };
    let taken_over =
        [InstallStep::Remove(program.clone()), InstallStep::Restart, InstallStep::AwaitConnection];
    let [InstallStep::Remove(first), rest @ ..] = &steps(&packaged, &InstallWish::default())[..] else {
        panic!()
    };
    assert_eq!(*first, unit);
    assert_eq!(
        rest,
        [
            InstallStep::Remove(program),
            InstallStep::Reload,
            InstallStep::Enable,
            InstallStep::Restart,
            InstallStep::AwaitConnection
        ]
    );
    let own = UNIT_FILE.replace("/usr/local/bin/", "/usr/bin/");
    assert_eq!(
        steps(&MachineFacts { unit: Some(own), ..packaged.clone() }, &InstallWish::default()),
        taken_over
    );
    let clean = MachineFacts { unit: None, has_own_program: false, ..packaged };
    assert_eq!(steps(&clean, &InstallWish::default()), [InstallStep::AwaitConnection]);
}

#[test]
fn without_systemd_the_rest_is_explained() {
    for init in [Init::OpenRc, Init::Runit, Init::Container, Init::Unknown] {
        let first = steps(&MachineFacts { init, ..bare() }, &line());
        let [
            InstallStep::CreateStateDir,
            InstallStep::Join { .. },
            InstallStep::CopyProgram,
            InstallStep::WriteSettings(_),
            InstallStep::Explain(said),
        ] = &first[..]
        else {
            panic!("{first:?}");
        };
        assert_eq!(*said, init);
        // Again, while the agent runs.
        let running = MachineFacts { init, is_enabled: false, is_running: false, ..installed() };
        assert_eq!(steps(&running, &line()), [InstallStep::Explain(init)]);
        let of_another = MachineFacts { has_own_program: false, ..running };
        assert!(matches!(plan_of(&of_another, &line()), Err(InstallRefusal::OtherAgent(_))));
    }
}

#[test]
fn impossible_requests_are_refused_with_a_remedy() {
    let settings = |text: &str| MachineFacts { settings: Some(text.to_owned()), ..installed() };
    for (facts, wish, words) in [
        (bare(), InstallWish { has_token: false, ..line() }, "set PREPULL_TOKEN, or give --token-file"),
        (bare(), InstallWish { has_token: true, ..InstallWish::default() }, "--server is missing"),
        (bare(), InstallWish { node: Some("Edge 1".into()), ..line() }, "as in `kubectl get nodes`"),
        (MachineFacts { host_name: "(none)".to_owned(), ..bare() }, line(), "--node-name \"(none)\" is not"),
        (
            MachineFacts { is_running: false, ..installed() },
            line(),
            "another edgecore-prepull uses /var/lib/edgecore-prepull",
        ),
        (settings("tunnelUrl: wss://a\n"), line(), "config.yaml: tunnelUrl and enrollUrl override"),
        (settings("stateDir: /srv/x\n"), line(), "write to /var/lib/edgecore-prepull only"),
        (settings("maxTasks: many\n"), line(), "config.yaml: wrong, line 1, \"maxTasks: many\""),
    ] {
        let said = plan_of(&facts, &wish).unwrap_err().to_string();
        assert!(said.contains(words), "{words}: {said}");
    }
    // The addresses in the file are the administrator's, as long as the command line gives no others.
    assert_eq!(
        steps(&settings("tunnelUrl: wss://a\n"), &InstallWish::default()),
        [InstallStep::AwaitConnection]
    );
}

#[test]
fn a_dry_run_shows_each_step() {
    let mut wish = line();
    wish.settings.insert("runtimeEndpoint".to_owned(), "unix:///run/x.sock".into());
    let plan = plan_of(&bare(), &wish).unwrap();
    let shown: Vec<_> =
        plan.steps.iter().map(|step| step.describe(&plan, &InstallPlaces::default())).collect();
    let shown = shown.join("\n");
    for line in [
        "join as node edge-1 at https://cloud:10002, with the token",
        "copy this program to /usr/local/bin/edgecore-prepull (mode 0755)",
        "    runtimeEndpoint: \"unix:///run/x.sock\"",
        "systemctl reenable edgecore-prepull.service",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
}
