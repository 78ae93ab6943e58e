//! The context of an engine's step: the time, and the sink for its actions.

use jiff::Timestamp;

/// The time of a step, and the actions that it asks for.
#[derive(Debug)]
pub(crate) struct Effects<'a, A> {
    /// The time, the same for the whole step.
    pub(crate) now: Timestamp,
    actions: &'a mut Vec<A>,
}

impl<'a, A> Effects<'a, A> {
    /// A step at this time, which appends its actions to these.
    pub(crate) fn new(now: Timestamp, actions: &'a mut Vec<A>) -> Self {
        Self { now, actions }
    }

    /// Asks for an action. Actions are carried out in the order in which they were asked for.
    pub(crate) fn emit(&mut self, action: A) {
        self.actions.push(action);
    }
}
