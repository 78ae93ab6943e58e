//! Images that are flushed to the disk before they are reported.

use super::windows::{set_clock, windowed};
use super::*;

#[tokio::test(start_paused = true)]
async fn a_pulled_image_is_on_disk() {
    let fake = Fake::new();
    let mut run = start(&executor(&fake), execution(vec![always("a")]));
    loop {
        if let TaskUpdate::ImageEnded { result, .. } = run.updates.recv().await.unwrap() {
            assert_eq!(result.outcome, New);
            break;
        }
        assert_eq!(fake.state.lock().unwrap().flushed, 0);
    }
    assert_eq!(fake.state.lock().unwrap().flushed, 1, "flushed before it was reported");
    let end = super::run(&fake, execution(vec![image("a", PullPolicy::IfNotPresent, 0)])).await;
    assert_eq!((outcomes(&end), fake.state.lock().unwrap().flushed), (vec![Already], 1));
}

#[tokio::test(start_paused = true)]
async fn a_present_image_is_flushed_once_a_start() {
    for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
        let fake = Fake::new();
        fake.state.lock().unwrap().present = vec!["a".to_owned()];
        fake.state.lock().unwrap().unflushed = 1;
        let executor = executor(&fake);
        for _ in 0..2 {
            let end = run_on(&executor, execution(vec![image("a", policy, 0)])).await;
            assert_eq!((outcomes(&end), fake.state.lock().unwrap().flushed), (vec![Already], 1), "{policy}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_flush_is_made_up_for() {
    let fake = Fake::new();
    fake.state.lock().unwrap().flush_takes = Duration::from_secs(1000);
    let executor = executor(&fake);
    let end = run_on(&executor, execution(vec![always("a")])).await;
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![Stopped]));
    fake.state.lock().unwrap().flush_takes = Duration::from_secs(10);
    let end = run_on(&executor, execution(vec![image("a", PullPolicy::IfNotPresent, 0)])).await;
    assert_eq!((outcomes(&end), fake.state.lock().unwrap().flushed), (vec![Already], 1));
}

#[tokio::test(start_paused = true)]
async fn what_is_on_the_disk_isnt_flushed_again() {
    let fake = Fake::new();
    fake.state.lock().unwrap().pulls_to_disk = true;
    let end = run(&fake, execution(vec![always("a")])).await;
    assert_eq!((outcomes(&end), fake.state.lock().unwrap().flushed), (vec![New], 0));
}

#[tokio::test(start_paused = true)]
async fn flushing_holds_no_permit() {
    let fake = Fake::new();
    fake.state.lock().unwrap().flush_takes = Duration::from_secs(60);
    let executor = Arc::new(Executor::new(fake.clone(), NonZeroUsize::MIN, CheckLimits::default()));
    let begun = Instant::now();
    let end = run_on(&executor, execution(["a", "b", "c", "d"].map(always).into())).await;
    assert_eq!(outcomes(&end), [New; 4]);
    assert_eq!(begun.elapsed().as_secs(), 4 + 60);
    assert_eq!(fake.state.lock().unwrap().most, 1);
}

#[tokio::test(start_paused = true)]
async fn no_image_is_present_during_its_flush() {
    set_clock("12:00:00");
    let fake = Fake::new();
    fake.state.lock().unwrap().flush_takes = Duration::from_secs(60);
    let executor = windows::executor(&fake);
    let _first = start(&executor, execution(vec![always("a")]));
    sleep(Duration::from_secs(10)).await;
    let mut second = windowed(vec![image("a", PullPolicy::IfNotPresent, 0)], 300, &["22:00+1h UTC"]);
    second.task.id.attempt = 2;
    let end = run_on(&executor, second).await;
    assert_eq!(outcomes(&end), [Already]);
    assert!(fake.state.lock().unwrap().flushed > 0);
}

#[tokio::test(start_paused = true)]
async fn an_image_that_the_disk_refuses_fails() {
    for (policy, retries) in [(PullPolicy::Always, 0), (PullPolicy::Always, 1), (PullPolicy::IfNotPresent, 2)]
    {
        let fake = Fake::new();
        fake.state.lock().unwrap().flush_errors = vec![PullError::new(ErrorClass::Transient, "I/O error")];
        let executor = executor(&fake);
        let end = run_on(&executor, execution(vec![image("a", policy, retries)])).await;
        assert_eq!((outcomes(&end), end.images[0].reason.as_str()), (vec![Failed], "I/O error"));
        // Nothing repairs what is there, and the kernel reports the loss once.
        let looks = || execution(vec![image("a", PullPolicy::IfNotPresent, 0)]);
        assert_eq!(outcomes(&run_on(&executor, looks()).await), [Failed]);
        assert_eq!(outcomes(&run_on(&executor, execution(vec![always("a")])).await), [Failed]);
        fake.state.lock().unwrap().present.clear();
        assert_eq!(outcomes(&run_on(&executor, execution(vec![image("a", policy, 0)])).await), [New]);
        assert_eq!(outcomes(&run_on(&executor, looks()).await), [Already]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_flush_fails_a_present_image() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["a".to_owned()];
    fake.state.lock().unwrap().unflushed = 1;
    fake.state.lock().unwrap().flush_errors = vec![PullError::new(ErrorClass::NoSpace, "full")];
    let (executor, looks) = (executor(&fake), || execution(vec![image("a", PullPolicy::IfNotPresent, 1)]));
    let end = run_on(&executor, looks()).await;
    assert_eq!((outcomes(&end), end.images[0].code), (vec![Failed], Some(Is::NoSpace)));
    assert_eq!(outcomes(&run_on(&executor, looks()).await), [Failed], "the kernel reports it once");
    assert_eq!(outcomes(&run(&fake, looks()).await), [Already], "after a restart");
}

#[tokio::test(start_paused = true)]
async fn an_image_that_came_back_is_not_refused() {
    let fake = Fake::new();
    fake.state.lock().unwrap().flush_errors = vec![PullError::new(ErrorClass::Transient, "I/O error")];
    let executor = executor(&fake);
    let looks = || execution(vec![image("a", PullPolicy::Never, 0)]);
    assert_eq!(outcomes(&run_on(&executor, execution(vec![always("a")])).await), [Failed]);
    assert_eq!(outcomes(&run_on(&executor, looks()).await), [Failed]);
    fake.state.lock().unwrap().present.clear();
    assert_eq!(outcomes(&run_on(&executor, looks()).await), [Failed], "it's gone");
    // The kubelet has pulled it.
    fake.state.lock().unwrap().present = vec!["a".to_owned()];
    assert_eq!(outcomes(&run_on(&executor, looks()).await), [Already]);
}

#[tokio::test(start_paused = true)]
async fn another_image_is_not_refused() {
    for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
        let fake = Fake::new();
        fake.state.lock().unwrap().flush_errors = vec![PullError::new(ErrorClass::Transient, "I/O error")];
        let executor = executor(&fake);
        let looks = || execution(vec![image("a", policy, 0)]);
        assert_eq!(outcomes(&run_on(&executor, execution(vec![always("a")])).await), [Failed]);
        // The kubelet has pulled what the tag names now.
        fake.state.lock().unwrap().id = Some("sha256:other".to_owned());
        assert_eq!(outcomes(&run_on(&executor, looks()).await), [Already], "{policy}");
        fake.state.lock().unwrap().id = None;
        assert_eq!(outcomes(&run_on(&executor, looks()).await), [Failed], "the first is back: {policy}");
    }
}

#[tokio::test(start_paused = true)]
async fn anothers_refused_flush_fails_a_pull() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(10)]);
    let executor = executor(&fake);
    let run = start(&executor, execution(vec![always("a")]));
    sleep(Duration::from_secs(5)).await;
    // What was lost may be a file of this image, and its own flush succeeds.
    fake.refuse_another();
    let end = run.end.await.unwrap();
    assert_eq!(outcomes(&end), [Failed]);
    assert!(end.images[0].reason.contains("lost"), "{end:?}");
    assert_eq!(fake.state.lock().unwrap().flushed, 1);
    assert_eq!(outcomes(&run_on(&executor, execution(vec![always("b")])).await), [New], "it came later");
}
