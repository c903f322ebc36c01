//! Acts as another user, in one thread and for a short time.
//!
//! Linux keeps the user of file accesses per thread. Root takes on the rights of the agent's user
//! for each access to the agent's directory, so that nothing in it can make root read or change a
//! file that the agent's user may not read or change.

use std::future::poll_fn;
use std::io;
use std::marker::PhantomData;
use std::pin::pin;

use rustix::process::{Gid, Uid, getegid, geteuid, getgroups};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::directory::Owner;

/// This thread acts as another user until the value is dropped.
pub struct ActingAs {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    /// The value must be dropped in the thread that made it.
    _not_send: PhantomData<*const ()>,
}

impl ActingAs {
    /// Starts to act as a user. Only root can.
    pub fn start(user: Owner) -> io::Result<ActingAs> {
        let acting = ActingAs {
            uid: geteuid(),
            gid: getegid(),
            groups: getgroups()?,
            _not_send: PhantomData,
        };
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        // The user comes last: without root's rights, the groups cannot be changed. If a step
        // fails, the drop undoes the others.
        set_thread_groups(&[gid])?;
        set_thread_res_gid(None, gid, None)?;
        set_thread_res_uid(None, uid, None)?;
        Ok(acting)
    }

    fn end(&self) -> rustix::io::Result<()> {
        set_thread_res_uid(None, self.uid, None)?;
        set_thread_res_gid(None, self.gid, None)?;
        set_thread_groups(&self.groups)
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        if self.end().is_err() && geteuid() != self.uid {
            // A thread with the wrong user would fail at unrelated work.
            std::process::abort();
        }
    }
}

/// Polls a future as another user. Threads that it starts act as that user for their whole life.
pub async fn poll_as<T>(user: Option<Owner>, future: impl Future<Output = T>) -> io::Result<T> {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _acting = match user.map(ActingAs::start).transpose() {
            Ok(acting) => acting,
            Err(error) => return std::task::Poll::Ready(Err(error)),
        };
        future.as_mut().poll(context).map(Ok)
    })
    .await
}
