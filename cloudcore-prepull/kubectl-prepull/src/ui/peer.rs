//! Finds the user at the other end of a connection on the loopback address.
//!
//! The program that opens the browser has the page's address among its arguments, which every user of the machine may read.
//! So on Linux the address alone is not enough: the kernel's tables of sockets name the user of each.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::{TcpListener, TcpStream};

/// The kernel's tables of the TCP sockets in this network namespace: a browser may reach an IPv4 address by a socket of IPv6.
const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
/// A connection that something relays into a virtual machine, as on WSL, comes from root, who may do everything as it is.
const ROOT: u32 = 0;
/// The state of a socket that is open on both sides. The kernel names root as the user of a socket that was closed.
const ESTABLISHED: &str = "01";
/// The inode of a socket that no program has.
const NO_INODE: &str = "0";

/// Accepts the connections of our own user. Those of others are closed before anything of them is read: a thousand that send
/// nothing are all the files that this program may open, and our own browser could not connect.
pub(crate) struct OwnListener {
    listener: TcpListener,
    server: SocketAddr,
    is_own: fn(SocketAddr, SocketAddr) -> bool,
}

impl OwnListener {
    pub(crate) fn new(listener: TcpListener, server: SocketAddr) -> Self {
        Self { listener, server, is_own: is_own_user }
    }
}

impl Listener for OwnListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            let (stream, peer) = Listener::accept(&mut self.listener).await;
            if (self.is_own)(peer, self.server) {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.server)
    }
}

/// The address at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagePeer(pub(crate) SocketAddr);

impl Connected<IncomingStream<'_, OwnListener>> for PagePeer {
    fn connect_info(stream: IncomingStream<'_, OwnListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// Whether the program that connects from `peer` to `server` is of our own user, or of root. `true` where the machine has no
/// such tables.
pub(crate) fn is_own_user(peer: SocketAddr, server: SocketAddr) -> bool {
    let (SocketAddr::V4(peer), SocketAddr::V4(server)) = (peer, server) else { return false };
    is_own_user_by(TABLES.map(fs::read_to_string), peer, server)
}

/// The same by the tables, as they were read. A kernel without IPv6 has no second one.
fn is_own_user_by([four, six]: [io::Result<String>; 2], peer: SocketAddrV4, server: SocketAddrV4) -> bool {
    let is_absent = |table: &io::Result<String>| {
        table.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    if is_absent(&four) {
        return true;
    }
    let six = if is_absent(&six) { Ok(String::new()) } else { six };
    // What can't be read for another reason may hold the socket of another user.
    let (Ok(four), Ok(six)) = (four, six) else { return false };
    let owner = owner_of(&four, peer, server).or_else(|| owner_of(&six, peer, server));
    owner.is_some_and(|owner| owner == ROOT || owner == rustix::process::geteuid().as_raw())
}

/// The user of the socket from `local` to `remote`, by a table of the kernel.
fn owner_of(table: &str, local: SocketAddrV4, remote: SocketAddrV4) -> Option<u32> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_it = parse(fields.next()?)? == local && parse(fields.next()?)? == remote;
        if !is_it || fields.next()? != ESTABLISHED {
            return None;
        }
        // After the queues, the timer and the retransmissions.
        let user = fields.nth(3)?.parse().ok()?;
        // After the time-out.
        (fields.nth(1)? != NO_INODE).then_some(user)
    })
}

/// An address such as `0100007F:1F90`: the last four bytes as a number of this machine's byte order, and the port. Of IPv6,
/// those that stand for an address of IPv4.
fn parse(address: &str) -> Option<SocketAddrV4> {
    let (host, port) = address.split_once(':')?;
    let (before, last) = host.split_at_checked(host.len().checked_sub(8)?)?;
    if !matches!(before, "" | "0000000000000000FFFF0000" | "00000000000000000000FFFF") {
        return None;
    }
    let host = u32::from_str_radix(last, 16).ok()?;
    Some(SocketAddrV4::new(Ipv4Addr::from(host.to_ne_bytes()), u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_foreign_connection_is_closed_unread() {
        static HAS_ASKED: AtomicBool = AtomicBool::new(false);
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let server = listener.local_addr().unwrap();
        let mut foreign = TcpStream::connect(server).unwrap();
        let own = TcpStream::connect(server).unwrap();
        // The first one is refused.
        let is_own: fn(SocketAddr, SocketAddr) -> bool = |_, _| HAS_ASKED.swap(true, Ordering::Relaxed);
        let (_stream, peer) = OwnListener { listener, server, is_own }.accept().await;
        assert_eq!(peer, own.local_addr().unwrap());
        foreign.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert_eq!(foreign.read(&mut [0]).unwrap(), 0, "closed, and it has sent nothing");
    }

    #[test]
    fn a_connection_of_our_own_is_ours() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let server = listener.local_addr().unwrap();
        let connection = TcpStream::connect(server).unwrap();
        assert!(is_own_user(connection.local_addr().unwrap(), server));
        assert!(!is_own_user(([127, 0, 0, 1], 1).into(), server), "nothing connects from there");
    }

    #[test]
    fn a_connection_its_program_has_closed_is_none() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let server = listener.local_addr().unwrap();
        let connection = TcpStream::connect(server).unwrap();
        let accepted = listener.accept().unwrap();
        let peer = connection.local_addr().unwrap();
        drop(connection);
        assert!(!is_own_user(peer, server), "the kernel names root as the user of what is left of it");
        drop(accepted);
    }

    #[test]
    fn an_unreadable_table_lets_no_one_in() {
        let at = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        let is_own = |four, six| is_own_user_by([four, six], at(40_000), at(8080));
        let absent = || Err(io::ErrorKind::NotFound.into());
        let unreadable = || Err(io::ErrorKind::Other.into());
        assert!(is_own(absent(), absent()), "a machine without such tables");
        assert!(!is_own(Ok(String::new()), absent()), "a kernel without IPv6, and the socket is in no table");
        assert!(!is_own(Ok(String::new()), unreadable()));
        assert!(!is_own(unreadable(), Ok(String::new())));
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn the_user_of_a_socket_is_read() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let rest =
            "00000000:00000000 00:00000000 00000000  1000        0 4242 1 0000000000000000 20 4 30 10 -1\n";
        let at = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        let four = format!("{head}   0: 0100007F:9C40 0100007F:1F90 01 {rest}");
        let six = format!(
            "{head}   0: 0000000000000000FFFF00000100007F:9C40 0000000000000000FFFF00000100007F:1F90 01 {rest}"
        );
        let other = format!(
            "{head}   0: 00000000000000000000000001000000:9C40 00000000000000000000000001000000:1F90 01 {rest}"
        );
        let closed = four.replace(" 01 ", " 05 ").replace(" 1000 ", " 0 ");
        let orphan = four.replace(" 1000 ", " 0 ").replace(" 4242 ", " 0 ");
        for (table, owner) in [
            (four.as_str(), Some(1000)),
            (&six, Some(1000)),
            (&other, None),
            (&closed, None),
            (&orphan, None),
            (head, None),
            ("x", None),
        ] {
            assert_eq!(owner_of(table, at(40_000), at(8080)), owner, "{table}");
        }
        assert_eq!(owner_of(&four, at(8080), at(40_000)), None, "the other direction");
    }
}
