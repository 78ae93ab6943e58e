#![allow(clippy::unwrap_used)]

use super::values::DEFAULT_METRICS_LISTEN;
use super::*;

#[test]
fn an_amount_is_percent_or_bytes() {
    for (text, amount) in [
        ("10%", Amount::Percent(10)),
        ("0%", Amount::Percent(0)),
        ("5GiB", Amount::Bytes(5 << 30)),
        ("512Mi", Amount::Bytes(512 << 20)),
        ("100B", Amount::Bytes(100)),
        ("0", Amount::Bytes(0)),
    ] {
        assert_eq!(text.parse(), Ok(amount), "{text}");
    }
    for text in ["", "%", "101%", "-1", "5 parsecs", "99999999999999999999", "1.5GiB", "10", "GiB"] {
        assert!(text.parse::<Amount>().is_err(), "{text}");
    }
    assert_eq!("10".parse::<Amount>().unwrap_err(), "\"10\" has no unit: write 10%, 512MiB or 5GiB");
    assert_eq!(Amount::Percent(10).in_bytes(u64::MAX), u64::MAX / 10);
    assert_eq!(Listen::default(), Listen::On(DEFAULT_METRICS_LISTEN.parse().unwrap()));
}

#[test]
fn flags_win_over_the_file_and_defaults() {
    let file: AgentSettings =
        serde_saphyr::from_str("parallelPulls: 7\nstateDir: /x\ndiskMinFree: 5%\nmetricsListen: off\n")
            .unwrap();
    let flags = AgentSettings { state_dir: Some("/y".into()), ..AgentSettings::default() };
    let effective = flags.or_file(file);
    assert_eq!((effective.state_dir, effective.parallel_pulls.get()), (PathBuf::from("/y"), 7));
    assert_eq!(effective.limits.disk_min_free, Amount::Percent(5));
    assert_eq!(effective.limits.cpu_max_load, DEFAULT_CPU_MAX_LOAD);
    assert_eq!(effective.metrics_listen, Listen::Off);
}

#[test]
fn an_unknown_key_is_named() {
    let error = serde_saphyr::from_str::<AgentSettings>("paralelPulls: 7\n").unwrap_err().to_string();
    assert!(error.contains("paralelPulls"), "{error}");
}

#[test]
fn unfinished_pulls_are_kept_for_1m_to_336h() {
    for (text, seconds) in [("1m", 60), ("6h", 6 * 3600), ("14days", 336 * 3600)] {
        assert_eq!(text.parse::<KeepTime>().map(|time| time.0), Ok(Duration::from_secs(seconds)), "{text}");
    }
    for text in ["59s", "15days", "day", ""] {
        let error = text.parse::<KeepTime>().unwrap_err();
        assert!(error.contains("from 1m to 336h"), "{error}");
    }
}

#[test]
fn max_tasks_is_1_to_64() {
    let of = |file: &str| {
        let file = serde_saphyr::from_str::<AgentSettings>(file)?;
        Ok::<_, serde_saphyr::Error>(AgentSettings::default().or_file(file).max_tasks.0.get())
    };
    assert_eq!(of("parallelPulls: 7").unwrap(), 1);
    assert_eq!(of("maxTasks: 64").unwrap(), 64);
    for bad in ["0", "65", "-1", "many"] {
        let error = of(&format!("maxTasks: {bad}")).unwrap_err().to_string();
        assert!(bad == "-1" || error.contains("from 1 to 64"), "{error}");
        assert!(bad.parse::<MaxTasks>().is_err(), "{bad}");
    }
}

#[test]
fn at_least_one_image_is_pulled_at_a_time() {
    let of = |file: &str| {
        let file = serde_saphyr::from_str::<AgentSettings>(file)?;
        Ok::<_, serde_saphyr::Error>(AgentSettings::default().or_file(file).parallel_pulls.get())
    };
    assert_eq!(of("maxTasks: 1").unwrap(), 3);
    assert_eq!(of("parallelPulls: 1").unwrap(), 1);
    for bad in ["0", "many"] {
        let error = of(&format!("parallelPulls: {bad}")).unwrap_err().to_string();
        assert!(error.contains(&format!("{bad:?} is not a number of images: write 1 or more")), "{error}");
    }
}

#[test]
fn the_gc_threshold_is_1_to_100_percent() {
    let of = |file: &str| {
        let file = serde_saphyr::from_str::<AgentSettings>(file)?;
        Ok::<_, serde_saphyr::Error>(AgentSettings::default().or_file(file).fetch.room.gc_high_threshold)
    };
    for (file, percent) in [
        ("maxTasks: 1", 85),
        ("imageGcHighThreshold: 1%", 1),
        ("imageGcHighThreshold: 80", 80),
        ("imageGcHighThreshold: 100%", 100),
    ] {
        assert_eq!(of(file).unwrap(), Percent(percent), "{file}");
    }
    for bad in ["0%", "101%", "120", "full"] {
        let error = of(&format!("imageGcHighThreshold: {bad}")).unwrap_err().to_string();
        assert!(error.contains(&format!("{bad:?} is not a percentage from 1% to 100%")), "{error}");
    }
    // The load of processors may be higher.
    assert_eq!("120%".parse(), Ok(Percent(120)));
}

#[test]
fn settings_are_written_as_they_are_read() {
    let text = "parallelPulls: 2\nimageGcHighThreshold: 100%\n";
    let settings: AgentSettings = serde_saphyr::from_str(text).unwrap();
    assert_eq!(serde_saphyr::to_string(&settings).unwrap(), text);
}

#[test]
fn flags_replace_all_urls_of_the_file() {
    let of = |flags: &[&str], file: &str| {
        let tunnel_url = flags.iter().map(|url| (*url).to_owned()).collect();
        let flags = AgentSettings { tunnel_url, ..AgentSettings::default() };
        flags.or_file(serde_saphyr::from_str(file).unwrap()).tunnel_urls.to_string()
    };
    assert_eq!(of(&[], "parallelPulls: 1"), "");
    assert_eq!(of(&[], "tunnelUrl: wss://a"), "wss://a");
    assert_eq!(of(&[], "tunnelUrl: [wss://a, wss://b]"), "wss://a,wss://b");
    assert_eq!(of(&["wss://c", "wss://d"], "tunnelUrl: [wss://a, wss://b]"), "wss://c,wss://d");
}

#[test]
fn providers_are_set_by_flag_or_file() {
    let file: AgentSettings =
        serde_saphyr::from_str("imageCredentialProviderConfig: /f\nimageCredentialProviderBinDir: /b\n")
            .unwrap();
    let of = |flags: AgentSettings| {
        let ProviderSettings { config, bin_dir, timeout } = flags.or_file(file.clone()).providers;
        (config, bin_dir, timeout)
    };
    assert_eq!(of(AgentSettings::default()), (Some("/f".into()), Some("/b".into()), None));
    let flag =
        AgentSettings { image_credential_provider_config: Some("/g".into()), ..AgentSettings::default() };
    assert_eq!(of(flag), (Some("/g".into()), Some("/b".into()), None));
    assert_eq!(
        AgentSettings::default().or_file(AgentSettings::default()).providers,
        ProviderSettings::default()
    );
}

#[test]
fn the_kubelet_directory_is_configurable() {
    let of = |flag: Option<&str>, file: &str| {
        let flags = AgentSettings { kubelet_dir: flag.map(Into::into), ..AgentSettings::default() };
        flags.or_file(AgentSettings::from_text(file).unwrap()).kubelet_dir
    };
    assert_eq!(of(None, ""), PathBuf::from("/var/lib/kubelet"));
    assert_eq!(of(None, "kubeletDir: /file"), PathBuf::from("/file"));
    assert_eq!(of(Some("/flag"), "kubeletDir: /file"), PathBuf::from("/flag"));
}

#[test]
fn the_shipped_file_is_valid() {
    let text = include_str!("../../../manifests/edgecore-prepull/config.yaml");
    let shipped: AgentSettings = serde_saphyr::from_str(text).unwrap();
    assert_eq!(
        shipped.or_file(AgentSettings::default()),
        AgentSettings::default().or_file(AgentSettings::default())
    );
    let shown: String = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(setting)
                if setting
                    .split_once(": ")
                    .is_some_and(|(key, _)| key.chars().all(char::is_alphanumeric)) =>
            {
                setting
            }
            _ => line,
        })
        .fold(String::new(), |all, line| all + line + "\n");
    let shown: AgentSettings = serde_saphyr::from_str(&shown).unwrap();
    assert!(
        shown.image_credential_provider_config.is_some() && shown.image_credential_provider_bin_dir.is_some()
    );
}

#[test]
fn windows_are_set_by_flags_or_file() {
    let file = |text: &str| AgentSettings::from_text(text);
    let of = |flags: &[&str], text: &str| {
        let download_window = flags.iter().map(|window| window.parse().unwrap()).collect();
        let flags = AgentSettings { download_window, ..AgentSettings::default() };
        let windows = flags.or_file(file(text).unwrap()).download_windows;
        windows.iter().map(|window| prepull_window::write_window(&window.0)).collect::<Vec<_>>()
    };
    let text = "downloadWindow: [\"Mon-Fri 01:00+4h Europe/Berlin\", \"Sat,Sun 00:00+24h\"]";
    let both = ["Mon,Tue,Wed,Thu,Fri 01:00+4h Europe/Berlin", "Sat,Sun 00:00+24h Node"];
    assert_eq!(of(&[], text), both);
    assert_eq!(of(&["02:00+1h"], text), ["02:00+1h Node"]);
    assert_eq!(of(&[], "parallelPulls: 1"), Vec::<String>::new());
    let error = file("downloadWindow: [\"25:00+1h\"]").unwrap_err();
    assert!(error.contains("line 1") && error.contains("\"25:00\" is not a time of day"), "{error}");
}
