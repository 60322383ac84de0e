"""RUN A STEP IN THE BACKGROUND: jobs, their queue, and who carries them out."""
