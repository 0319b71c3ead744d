"""What to do where the system refuses a file or folder."""

import errno

_REMEDIES = {
    errno.ENOSPC: "free some room, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write to another disk",
    errno.EACCES: "give a place that you may read and write",
    errno.EPERM: "give a place that you may read and write",
    errno.EROFS: "give a place that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.EEXIST: "give another place: there is a file of that name",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "allow more open files: ulimit -n",
}


def remedy(error: OSError) -> str:
    """What to do about an error of the system."""
    return _REMEDIES.get(error.errno or 0, "check the file and the disk")
