//! Settings of the cloud, which hold for running tasks as well.

use prepull_api::settings::NodeSettings;
use prepull_api::wire::EdgeMessage;
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use super::NodeAgent;
use crate::cloud::tunnel::TunnelSender;
use crate::images::puller::Puller;
use crate::settings::describe_settings;
use crate::tasks::agent::AgentEvent;

impl<P: Puller> NodeAgent<P> {
    /// Puts the cloud's settings in force, and answers when they're on the disk.
    pub(super) fn configure(&mut self, settings: NodeSettings, link: &TunnelSender) {
        info!(settings = %describe_settings(&settings), "the cloud has set the node's settings");
        self.handle(AgentEvent::Windows(settings.windows.clone()));
        self.settings.put_in_force(settings);
        self.show_settings();
        let (clock, now) = (self.agent.clock(), self.now());
        for control in self.controls.values() {
            control.send_if_modified(|control| {
                let terms = control.terms.under_clock(clock, now);
                let is_new = terms != control.terms;
                control.terms = terms;
                is_new
            });
        }
        let (settings, link, windows) = (self.settings.clone(), link.clone(), clock.reported_windows());
        let storing = tokio::spawn(async move {
            let settings = settings.persist_latest().await;
            link.send(EdgeMessage::Configured { settings, windows }).await;
        });
        self.storing = Some(AbortOnDropHandle::new(storing));
    }

    /// Shows them in status and metrics.
    pub(super) fn show_settings(&self) {
        self.metrics.status().configure(self.settings.of_cloud());
        self.metrics.set_windows(self.agent.clock().own_openings(), self.hub.clock().clone());
    }
}
