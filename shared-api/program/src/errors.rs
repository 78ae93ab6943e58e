//! Errors as people read them.

use std::error::Error;

/// The error and its causes, in one line. Leaves out a cause that an earlier text already contains.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).fold(String::new(), |text, cause| match text {
        text if text.is_empty() => cause,
        text if text.contains(&cause) => text,
        text => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn repeated_causes_are_left_out() {
        // The outer error prints the inner one as its own text.
        let inner = io::Error::other("inner");
        assert_eq!(with_causes(&io::Error::other(inner)), "inner");
        let nested = "x".parse::<u8>().map_err(io::Error::other).map_err(io::Error::other);
        assert_eq!(
            nested.map_err(|error| with_causes(&error)),
            Err("invalid digit found in string".to_owned())
        );
    }
}
