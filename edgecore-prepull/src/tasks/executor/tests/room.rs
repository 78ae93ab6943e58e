//! Disks without room for an image.

use super::*;

#[tokio::test(start_paused = true)]
async fn an_estimate_discards_nothing() {
    let fake = Fake::new();
    let refused = || Act::Fail(ErrorClass::NoRoom, "no room for the image");
    fake.script("huge", [refused(), refused()]);
    fake.script("lucky", [refused(), Act::Take(1)]);
    let images = ["huge", "lucky"].map(|name| image(name, PullPolicy::Always, 1));
    let end = run(&fake, execution(images.to_vec())).await;
    assert_eq!(outcomes(&end), [Failed, New]);
    assert_eq!((end.images[0].code, end.images[0].attempts), (Some(Is::NoSpace), 2));
    assert_eq!(fake.state.lock().unwrap().given_up, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn the_check_counts_removable_images() {
    for (removable, outcome) in [(0, Failed), (5, New)] {
        let fake = Fake::new();
        {
            let mut state = fake.state.lock().unwrap();
            (state.free, state.removable) = (6, removable);
        }
        let end = run(&fake, execution(vec![always("a")])).await;
        assert_eq!(outcomes(&end), [outcome], "{removable}");
    }
}
